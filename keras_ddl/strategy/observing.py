"""Lets one observer, from `keras-ddl verify`, follow a program's training without changing the program.

Without an observer nothing is called and nothing is wrapped. The observer is a module variable, because it must see
everything that the process trains: `keras-ddl verify` sets it before the program runs, and so before there is a
Strategy or a model that could hold it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from keras_ddl import cut


class Observer(Protocol):
    """The observer's methods, which are called on every rank, even in a job of one rank."""

    def begin_step(self, owner: str, model: Any) -> None:
        """Called when a training step of a model, or of a function (`model` is None), begins. `owner`: its name."""

    def end_step(self, owner: str, model: Any, variables: Sequence[Any], returned: Any) -> None:
        """Called when the step has ended. variables: tf.Variables that a function uses; empty for a model."""

    def end_epoch(self, model: Any, logs: Any) -> None:
        """Called when an epoch of fit or an evaluation has ended, with its logs."""

    def predicted(self, model: Any, outputs: Any) -> None:
        """Called when `predict` has returned."""

    def made(self, variable: Any) -> None:
        """Called when a Keras variable has its first value."""

    def traced(self, step: str, program: cut.Program, report: cut.Report) -> None:
        """Called when a step was traced and cut into ranks."""

    def callbacks_of_fit(self, callbacks: Any) -> Any:
        """Returns the callbacks that fit should use."""


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
