"""Keeps the state of a call of fit, instead of storing it on Keras's objects."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from keras_ddl.compat.callbacks import set_initial_epoch
from keras_ddl.data.position import Reading
from keras_ddl.strategy.calls import trainer_calls


@dataclass(eq=False)
class Fit(trainer_calls.Loop):
    """One call of fit."""

    method: str = "fit"
    reading: Reading | None = None  # the reading of the training data
    resumed_at: int | None = None  # the epoch at which a resumed fit began
    logs_before: dict[str, Any] | None = None  # logs of the part of the epoch that ran before the resume
    agreed_stop: bool | None = None  # whether ranks have agreed to stop; None: not asked yet


def of(model: Any) -> Fit | None:
    """Returns the fit of `model` that is running on this thread, or None."""
    fits = (call for call in reversed(trainer_calls.running()) if isinstance(call, Fit) and call.model is model)
    return next(fits, None)


def reading_of(model: Any) -> Reading | None:
    """Returns the Reading of the running fit of `model`, or None."""
    fit = of(model)
    return None if fit is None else fit.reading


def is_outermost(model: Any) -> bool:
    """Whether a fit of `model` runs on this thread, and no other call of the trainer encloses it."""
    fit = of(model)
    return fit is not None and trainer_calls.running()[0] is fit


def any_is_running() -> bool:
    """Whether a model trains in fit on this thread."""
    return any(isinstance(call, Fit) for call in trainer_calls.running())


def begin_at(model: Any, epoch: int) -> None:
    """Makes the running fit of `model`, but no later one, begin with `epoch`."""
    set_initial_epoch(model, epoch)
    fit = of(model)
    if fit is not None:
        fit.resumed_at = epoch


@contextlib.contextmanager
def running(model: Any) -> Iterator[Fit]:
    """Makes `of(model)` return the yielded fit within the block."""
    fit = Fit(model)
    try:
        with fit.entered():
            yield fit
    finally:
        if fit.resumed_at is not None:
            set_initial_epoch(model, None)
