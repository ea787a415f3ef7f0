"""The worker threads on which models run, and the record of each request.

The event loop checks requests and passes arrays to the workers. Calls that are shorter than the hand-over it runs
itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from keras_ddl.serving.batching import Batcher, Batching
from keras_ddl.serving.model_manager import ModelManager
from keras_ddl.serving.servable import Servable, Signature
from keras_ddl.serving.status import Code, RequestError


class Workers:
    """A thread pool with a bounded queue."""

    def __init__(self, threads: int, queue: int, batching: Batching | None = None) -> None:
        """
        Args:
            threads: how many requests run at the same time.
            queue: how many more requests may wait; the next one is refused.
            batching: how rows of several requests are batched; None: not at all.
        """
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="keras_ddl-serve")
        self._limit, self._busy = threads + queue, 0
        self._batcher = Batcher(batching, self._call) if batching is not None else None

    async def run(
        self, servable: Servable, signature: Signature, feeds: Mapping[str, np.ndarray], fetches: Sequence[str]
    ) -> list[np.ndarray]:
        """Returns the outputs. Raises: RequestError: UNAVAILABLE: the queue is full; what the model raises."""
        if self._busy >= self._limit:
            raise RequestError(
                Code.UNAVAILABLE, f"The queue is full: {self._busy} requests are running. Try again later."
            )
        if self._batcher is not None:
            return await self._batcher.run(servable, signature, feeds, fetches)
        return await self._call(servable, signature, feeds, fetches)

    async def _call(
        self, servable: Servable, signature: Signature, feeds: Mapping[str, np.ndarray], fetches: Sequence[str]
    ) -> list[np.ndarray]:
        if not self._busy and servable.is_short(signature, feeds, fetches):
            return servable.run(signature, feeds, fetches)
        self._busy += 1
        loop = asyncio.get_running_loop()
        work = self._pool.submit(servable.run, signature, feeds, fetches)
        # A call that its client has given up counts for as long as it runs.
        work.add_done_callback(lambda _: self._finished(loop))
        return await asyncio.wrap_future(work)

    def _finished(self, loop: asyncio.AbstractEventLoop) -> None:
        def one_less() -> None:
            self._busy -= 1

        with contextlib.suppress(RuntimeError):  # the loop has ended: the count no longer matters
            loop.call_soon_threadsafe(one_less)

    @property
    def busy(self) -> int:
        return self._busy

    def close(self) -> None:
        """Starts no more calls. Running ones continue."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class Record:
    """What the metrics and the access log record of one request."""

    def __init__(self, protocol: str, method: str) -> None:
        self.protocol, self.method = protocol, method
        self.model, self.signature = "", ""
        self.version: int | None = None
        self.code = Code.OK
        self.error = ""
        self._begin = time.perf_counter()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._begin


@contextlib.contextmanager
def model_of(models: ModelManager, record: Record, spec: Any) -> Iterator[Servable]:
    """Yields the version that a ModelSpec names."""
    record.model, record.signature = spec.name, spec.signature_name
    choice = spec.WhichOneof("version_choice")
    number = spec.version.value if choice == "version" else None
    with models.use(spec.name, number, spec.version_label if choice == "version_label" else "") as servable:
        record.version = servable.version
        yield servable
