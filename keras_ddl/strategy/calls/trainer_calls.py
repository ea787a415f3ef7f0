"""Tracks the calls of fit, evaluate and predict on this thread, and the executions of steps in them.

The patch of `fit` cannot pass an argument to the patched iterator, nor `train_function` to `Strategy.run`, because
Keras's code lies between them. So the outer function records its call here, and the inner one looks it up.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from keras_ddl.compat.context import Setting


@dataclass(eq=False)
class TrainerCall:
    """A call of a method of `model`'s trainer, or a call inside it."""

    model: Any

    def entered(self) -> AbstractContextManager[None]:
        """Returns the context in which this call runs, as the innermost on this thread."""
        return _running((*_running.get(), self))


class Follower(Protocol):
    """The list of callbacks of a Loop, as the part `resilience` sees it when a rank is lost."""

    def become_first(self, *, may_lack_last: bool) -> None:
        """Called when this rank becomes rank 0. may_lack_last: output since the last finished call may be missing."""

    def flush(self) -> None:
        """Writes data in rank 0's memory that the next rank 0 would consider written."""

    def compare(self) -> None:
        """Compares the weights of all ranks while a model trains. COLLECTIVE."""


@dataclass(eq=False)
class Loop(TrainerCall):
    """A call of fit, evaluate or predict, which `method` names.

    Attributes:
        iterator: the EpochIterator that the call made to read data; None before it is made, and in an evaluation for
            which fit made it.
        followers: the lists of callbacks that the call runs.
    """

    method: str
    iterator: Any = None
    followers: list[Follower] = field(default_factory=list)


_running: Setting[tuple[TrainerCall, ...]] = Setting("trainer_calls", ())


def running() -> tuple[TrainerCall, ...]:
    """Returns the calls that run on this thread, the innermost last."""
    return _running.get()


def followers() -> list[Follower]:
    """Returns the lists of callbacks of the calls that run on this thread."""
    return [each for call in _running.get() if isinstance(call, Loop) for each in call.followers]


def innermost() -> TrainerCall | None:
    """Returns the innermost call that runs on this thread, or None."""
    return next(reversed(_running.get()), None)
