"""Batches the rows of requests that arrive together."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from keras_ddl.serving.servable import Signature
from keras_ddl.serving.settings import Options
from keras_ddl.serving.status import Code, RequestError

# Of sparse and ragged inputs, as docs/export.md names their components.
_COMPONENT = re.compile(r"_(dense_shape|row_splits(_\d+)?)$")

Run = Callable[[Signature, Mapping[str, np.ndarray], Sequence[str]], list[np.ndarray]]


@dataclass
class _Batch:
    """Requests that one call answers. `done` is set when there are `outputs`, or an `error`."""

    feeds: list[Mapping[str, np.ndarray]] = field(default_factory=list)
    rows: int = 0
    full: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)
    outputs: list[np.ndarray] = field(default_factory=list)
    error: Exception | None = None


class Batcher:
    """Collects requests that one call can answer: of one signature and outputs, with rows of one shape.

    Each request has a thread. The first of a batch waits for others, and computes for all of them.
    """

    def __init__(self, options: Options, run: Run) -> None:
        self._max_rows, self._timeout_seconds, self._run = options.batch_rows, options.batch_seconds, run
        self._open: dict[Any, _Batch] = {}
        self._lock = threading.Lock()

    def run(self, signature: Signature, feeds: Mapping[str, np.ndarray], fetches: Sequence[str]) -> list[np.ndarray]:
        """Returns the outputs for `feeds` alone. Raises: what the call of the batch raises."""
        rows = _rows(feeds)
        if rows is None or rows >= self._max_rows:
            return self._run(signature, feeds, fetches)
        shapes = tuple((alias, array.dtype.str, array.shape[1:]) for alias, array in sorted(feeds.items()))
        key = (signature.name, tuple(fetches), shapes)
        with self._lock:
            batch = self._open.get(key)
            if batch is not None and batch.rows + rows > self._max_rows:
                batch.full.set()
                batch = None
            is_first = batch is None
            if batch is None:
                batch = self._open[key] = _Batch()
            begin = batch.rows
            batch.feeds.append(feeds)
            batch.rows += rows
            if batch.rows == self._max_rows:
                batch.full.set()
        if is_first:
            batch.full.wait(self._timeout_seconds)
            with self._lock:
                if self._open.get(key) is batch:
                    del self._open[key]
            self._answer(batch, signature, fetches)
        else:
            batch.done.wait()
        if batch.error is not None:
            raise batch.error
        return [output[begin : begin + rows] for output in batch.outputs]

    def _answer(self, batch: _Batch, signature: Signature, fetches: Sequence[str]) -> None:
        try:
            feeds = {alias: np.concatenate([each[alias] for each in batch.feeds]) for alias in batch.feeds[0]}
            batch.outputs = self._run(signature, feeds, fetches)
            if any(output.shape[:1] != (batch.rows,) for output in batch.outputs):
                shapes = [list(output.shape) for output in batch.outputs]
                raise RequestError(
                    Code.FAILED_PRECONDITION,
                    f"Batching needs outputs with one row for each of the {batch.rows} input rows. The model returns "
                    f"{shapes}. Serve it without batching.",
                )
        except Exception as error:  # whatever it is, all waiting requests get it
            batch.error = error
        finally:
            batch.done.set()


def _rows(feeds: Mapping[str, np.ndarray]) -> int | None:
    """Returns the number of rows that all inputs have; None: they differ, or one has no rows of the batch."""
    if any(_COMPONENT.search(alias) for alias in feeds):  # their number may equal that of the rows by chance
        return None
    sizes = {array.shape[:1] for array in feeds.values()}
    (size,) = sizes if len(sizes) == 1 else [()]
    return size[0] if size else None
