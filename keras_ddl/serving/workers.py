"""The worker threads on which models run, and the record of each request.

The event loop checks requests and passes arrays to the workers. Calls that are shorter than the hand-over it runs
itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from keras_ddl.serving.batching import Batcher, Batching
from keras_ddl.serving.model_manager import ModelManager
from keras_ddl.serving.servable import Servable, Signature
from keras_ddl.serving.status import Code, RequestError


class Workers:
    """Threads and a bounded queue for each model: a slow one does not hold up another."""

    def __init__(self, threads: int, queue: int, batching: Batching | None = None) -> None:
        """
        Args:
            threads: how many requests of a model run at the same time.
            queue: how many more requests of a model may wait; the next one is refused.
            batching: how rows of several requests are batched; None: not at all.
        """
        self._threads, self._limit = threads, threads + queue
        self._pools: dict[str, ThreadPoolExecutor] = {}  # by model
        self._busy: Counter[str] = Counter()
        self._batcher = Batcher(batching, self._call) if batching is not None else None

    async def run(
        self, servable: Servable, signature: Signature, feeds: Mapping[str, np.ndarray], fetches: Sequence[str]
    ) -> list[np.ndarray]:
        """Returns the outputs. Raises: RequestError: UNAVAILABLE: the queue is full; what the model raises."""
        busy = self._busy[servable.name]
        if busy >= self._limit:
            raise RequestError(
                Code.UNAVAILABLE,
                f"The queue of model {servable.name!r} is full: {busy} requests are running. Try again later.",
            )
        if self._batcher is not None:
            return await self._batcher.run(servable, signature, feeds, fetches)
        return await self._call(servable, signature, feeds, fetches)

    async def _call(
        self, servable: Servable, signature: Signature, feeds: Mapping[str, np.ndarray], fetches: Sequence[str]
    ) -> list[np.ndarray]:
        name = servable.name
        if not self._busy[name] and servable.is_short(signature, feeds, fetches):
            return servable.run(signature, feeds, fetches)
        self._busy[name] += 1
        loop = asyncio.get_running_loop()
        work = self._pool(name).submit(servable.run, signature, feeds, fetches)
        # A call that its client has given up counts for as long as it runs.
        work.add_done_callback(lambda _: self._finished(loop, name))
        return await asyncio.wrap_future(work)

    def _pool(self, name: str) -> ThreadPoolExecutor:
        if name not in self._pools:
            self._pools[name] = ThreadPoolExecutor(self._threads, thread_name_prefix=f"keras_ddl-serve-{name}")
        return self._pools[name]

    def _finished(self, loop: asyncio.AbstractEventLoop, name: str) -> None:
        def one_less() -> None:
            self._busy[name] -= 1

        with contextlib.suppress(RuntimeError):  # the loop has ended: the count no longer matters
            loop.call_soon_threadsafe(one_less)

    @property
    def busy(self) -> int:
        return sum(self._busy.values())

    def close(self) -> None:
        """Starts no more calls. Running ones continue."""
        for pool in self._pools.values():
            pool.shutdown(wait=False, cancel_futures=True)


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
