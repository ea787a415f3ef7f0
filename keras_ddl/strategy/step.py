"""The step that Keras runs on this thread: the model whose train_step or test_step it is, and the batch.

Inside such a step a program is to mean what it means in one process. A step of the program's own, in
`strategy.run`, is none of these: there the conventions of tf.distribute hold.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_thread = threading.local()


@dataclass
class Step:
    """One call of a model's train_step or test_step, or the tracing of one."""

    model: Any
    batch: Any


def current() -> Step | None:
    """Returns the step of Keras that runs, or is being traced, on this thread; None in loops of the program's own."""
    return getattr(_thread, "step", None)


@contextlib.contextmanager
def running(model: Any, batch: Any) -> Iterator[Step]:
    """Inside, `current` is a step of `model` on `batch`, this rank's rows."""
    before, _thread.step = current(), Step(model, batch)
    try:
        yield _thread.step
    finally:
        _thread.step = before
