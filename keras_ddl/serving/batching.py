"""Batches the rows of requests that arrive together."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from keras_ddl.serving.servable import Servable, Signature
from keras_ddl.serving.status import Code, RequestError

# Of sparse and ragged inputs, as docs/export.md names their components.
_COMPONENT = re.compile(r"_(dense_shape|row_splits(_\d+)?)$")

Call = Callable[[Servable, Signature, Mapping[str, np.ndarray], Sequence[str]], Awaitable[list[np.ndarray]]]


@dataclass(frozen=True)
class Batching:
    """max_rows: of a batch. timeout_seconds: how long the first request of a batch waits for others."""

    max_rows: int = 32
    timeout_seconds: float = 0.001


@dataclass
class _Batch:
    feeds: list[Mapping[str, np.ndarray]] = field(default_factory=list)
    answers: list[asyncio.Future] = field(default_factory=list)
    rows: int = 0
    timer: Any = None


class Batcher:
    """Collects requests that one call can answer: of one version, signature and outputs, with rows of one shape. All on
    the event loop.
    """

    def __init__(self, options: Batching, call: Call) -> None:
        self._options, self._call = options, call
        self._open: dict[Any, _Batch] = {}
        self._tasks: set[asyncio.Task] = set()  # an unreferenced task may be garbage-collected

    async def run(
        self, servable: Servable, signature: Signature, feeds: Mapping[str, np.ndarray], fetches: Sequence[str]
    ) -> list[np.ndarray]:
        rows = _rows(feeds)
        if rows is None or rows >= self._options.max_rows:
            return await self._call(servable, signature, feeds, fetches)
        shapes = tuple((alias, array.dtype.str, array.shape[1:]) for alias, array in sorted(feeds.items()))
        key = (id(servable), signature.name, tuple(fetches), shapes)
        batch = self._open.get(key)
        if batch is not None and batch.rows + rows > self._options.max_rows:
            self._close(key, servable, signature, fetches)
            batch = None
        if batch is None:
            batch = self._open[key] = _Batch()
            batch.timer = asyncio.get_running_loop().call_later(
                self._options.timeout_seconds, self._close, key, servable, signature, fetches
            )
        answer = asyncio.get_running_loop().create_future()
        batch.feeds.append(feeds)
        batch.answers.append(answer)
        batch.rows += rows
        if batch.rows == self._options.max_rows:
            self._close(key, servable, signature, fetches)
        return await answer

    def _close(self, key: Any, servable: Servable, signature: Signature, fetches: Sequence[str]) -> None:
        batch = self._open.pop(key)
        batch.timer.cancel()
        task = asyncio.get_running_loop().create_task(self._answer(batch, servable, signature, fetches))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, batch: _Batch, servable: Servable, signature: Signature, fetches: Sequence[str]) -> None:
        waiting = [pair for pair in zip(batch.feeds, batch.answers) if not pair[1].done()]  # not those given up
        if not waiting:
            return
        feeds = {alias: np.concatenate([each[alias] for each, _ in waiting]) for alias in waiting[0][0]}
        sizes = [_rows(each) for each, _ in waiting]
        try:
            outputs = await self._call(servable, signature, feeds, fetches)
            if any(output.shape[:1] != (sum(sizes),) for output in outputs):
                shapes = [list(output.shape) for output in outputs]
                raise RequestError(
                    Code.FAILED_PRECONDITION,
                    f"Batching needs outputs with one row for each of the {sum(sizes)} input rows. The model returns "
                    f"{shapes}. Serve it without batching.",
                )
        except Exception as error:  # whatever it is, all waiting requests get it
            for _, answer in waiting:
                if not answer.done():
                    answer.set_exception(error)
            return
        ends = np.cumsum(sizes)
        for (_, answer), end, size in zip(waiting, ends, sizes):
            if not answer.done():
                answer.set_result([output[end - size : end] for output in outputs])


def _rows(feeds: Mapping[str, np.ndarray]) -> int | None:
    """Returns the number of rows that all inputs have; None: they differ, or one has no rows of the batch."""
    if any(_COMPONENT.search(alias) for alias in feeds):  # their number may equal that of the rows by chance
        return None
    sizes = {array.shape[:1] for array in feeds.values()}
    (size,) = sizes if len(sizes) == 1 else [()]
    return size[0] if size else None
