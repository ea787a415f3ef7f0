"""The step that runs, or is being traced, on this thread: whose it is, and what its tensors have to do with the rows.

A step of Keras (train_step, test_step) is to mean what it means in one process. In a step of the program's own, in
`strategy.run`, the conventions of tf.distribute hold.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from keras_ddl.compat.tensorflow import tf
from keras_ddl.strategy.data import static_rows
from keras_ddl.strategy.row_kinds import RowKinds
from keras_ddl.strategy.row_share import RowShare
from keras_ddl.strategy.row_values import RowValues
from keras_ddl.strategy.thread_value import ThreadValue

_innermost = ThreadValue()


class Step:
    """One call of a replica function, or the tracing of one."""

    def __init__(self, batch: Any, share: RowShare) -> None:
        self.model: Any = None  # in a step of Keras
        self.gradients: str | None = None  # what the tape has given so far: "reduced", or this rank's "parts"
        self.share = share
        self.batch = batch
        self._in_graph = not tf.executing_eagerly()  # not what a function that it calls is
        self._values: RowValues | None = None

    @property
    def values(self) -> RowValues:
        """How this step's values combine over ranks; made when something asks for it."""
        if self._values is None:
            kinds = None
            if self._in_graph:
                kinds = RowKinds(static_rows(self.batch))
                kinds.mark_batch(self.batch)
            self._values = RowValues(kinds, self.share, self.model or self.share)
        return self._values


def innermost() -> Step | None:
    """Returns the step on this thread, Keras's or the program's own."""
    return _innermost.get()


def current() -> Step | None:
    """Returns the step of Keras on this thread; None in loops of the program's own."""
    step = innermost()
    return None if step is None or step.model is None else step


@contextlib.contextmanager
def running(batch: Any, share: RowShare) -> Iterator[Step]:
    """Inside, `innermost` is a step on `batch`, this rank's rows."""
    step = Step(batch, share)
    with _innermost.set_to(step):
        yield step
