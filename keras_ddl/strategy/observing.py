"""Lets one observer, from `keras-ddl verify`, follow a program's training without changing the program.

Without an observer nothing is called and nothing is wrapped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from keras_ddl import cut


class Observer(Protocol):
    """The observer's methods, which are called on every rank, even in a job of one rank."""

    def begin_step(self, owner: str, model: Any) -> None:
        """A training step of a model begins; if `model` is None, a step of a function. `owner`: the name of either."""

    def end_step(self, owner: str, model: Any, variables: Sequence[Any], returned: Any) -> None:
        """The step has ended. variables: tf.Variables that a function uses; empty for a model."""

    def end_epoch(self, model: Any, logs: Any) -> None:
        """An epoch of fit or an evaluation has ended, with these logs."""

    def predicted(self, model: Any, outputs: Any) -> None:
        """`predict` has returned."""

    def made(self, variable: Any) -> None:
        """A Keras variable has its first value."""

    def traced(self, step: str, program: cut.Program, report: cut.Report) -> None:
        """A step was traced and cut into ranks."""

    def callbacks_of_fit(self, callbacks: Any) -> Any:
        """Returns the callbacks with which fit continues."""


_observers: list[Observer] = []


def observe(observer: Observer) -> None:
    """Makes `observer` follow all training of this process from now on, and replaces an earlier observer."""
    _observers[:] = [observer]


def observer() -> Observer | None:
    """Returns the observer of this process, or None."""
    return _observers[0] if _observers else None


def train_function(model: Any, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns a train_function of Keras or of several ranks, wrapped so that the observer follows each call."""
    follower = observer()
    if follower is None:
        return function

    def observed(data: Any) -> Any:
        follower.begin_step(model.name, model)
        returned = function(data)
        follower.end_step(model.name, model, (), returned)
        return returned

    return observed
