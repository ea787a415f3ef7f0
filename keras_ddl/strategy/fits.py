"""State of the fits that are running, by model, so that nothing is stored on Keras's objects."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from keras_ddl.compat.callbacks import set_initial_epoch

if TYPE_CHECKING:
    from keras_ddl.data.position import Reading


class Fit:
    """One call of fit."""

    def __init__(self) -> None:
        self.reading: Reading | None = None  # of the training data
        self.resumed_at: int | None = None  # the epoch with which a resumed fit has begun
        self.logs_before: dict[str, Any] | None = None  # of the part of an epoch that another process has trained
        self.agreed_stop: bool | None = None  # whether ranks have agreed to stop; None: nothing is agreed on


_running: weakref.WeakKeyDictionary[Any, Fit] = weakref.WeakKeyDictionary()


def of(model: Any) -> Fit | None:
    """Returns the fit of `model` that runs, or None outside of one."""
    return _running.get(model)


def reading_of(model: Any) -> Reading | None:
    """Returns how the fit of `model` that runs reads its data, or None outside of one."""
    fit = of(model)
    return None if fit is None else fit.reading


def any_is_running() -> bool:
    """Whether any model trains in fit."""
    return bool(_running)


def begin_at(model: Any, epoch: int) -> None:
    """Makes the fit of `model` that runs, and no later one, begin with `epoch`."""
    set_initial_epoch(model, epoch)
    fit = of(model)
    if fit is not None:
        fit.resumed_at = epoch


@contextlib.contextmanager
def running(model: Any) -> Iterator[Fit]:
    """Inside, `of(model)` is the fit that is yielded."""
    fit = _running[model] = Fit()
    try:
        yield fit
    finally:
        _running.pop(model, None)
        if fit.resumed_at is not None:
            set_initial_epoch(model, None)
