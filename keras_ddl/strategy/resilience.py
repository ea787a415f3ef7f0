"""The interface of the part `resilience`: everything that a Strategy calls in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keras_ddl import communicator, parts
from keras_ddl.communicator.newcomers import history
from keras_ddl.communicator.transports import membership


class Joining:
    """Lets ranks join a job. With this base class no rank can join, so its methods do nothing.

    Attributes:
        has_newcomers: whether ranks have ever joined; equal on all ranks between the same two calls.
    """

    has_newcomers = False

    def begin_fit(self, callbacks: Any) -> None:
        """Called when training begins, after on_train_begin of all callbacks. Newcomers join here.

        COLLECTIVE if there are newcomers.
        """

    def begin_epoch(self) -> bool:
        """Returns whether the other ranks are already in the epoch that this rank begins."""
        return False

    def between_steps(self, caller: Any) -> None:
        """Called before each step of fit. Ranks join and leave here. COLLECTIVE in that case."""

    def check_batch(self, batch: Any) -> None:
        """Called with each batch of fit before its step. Checks that newcomers read the same data as the others."""

    def prove(self, callbacks: Any) -> None:
        """Checks that newcomers have the same state as the others. COLLECTIVE if there are newcomers."""

    def end_fit(self) -> None:
        """Called when training has ended."""


class Resilience:
    """Base class: the job ends when a rank is lost, and no rank can join.

    The part derives from both classes (resilience/survival.py, resilience/joining_state.py).
    """

    joining: Joining = Joining()

    def finished(self) -> int:
        """Returns the number of finished calls, counting only calls that all ranks make."""
        return 0

    def call(self, run: Callable[[], Any], variables: Callable[[], list[Any]] = list, caller: Any = None) -> Any:
        """Returns `run()`, a call that all ranks make; repeats it while ranks are lost. COLLECTIVE.

        Args:
            variables: returns the variables that `run` may write.
            caller: the caller of the step that `run` runs.
        """
        return run()

    def call_of_trainer(
        self, method: str, model: Any, call: Callable[[], Any], callbacks: Callable[[], list[Any]] = list
    ) -> Any:
        """Returns `call()`, a call of the method fit, evaluate or predict. callbacks: returns the call's callbacks.

        If the other ranks have ended the call, a newcomer gets their result.
        """
        return call()


_usual = Resilience()


def is_possible() -> bool:
    """Whether this job continues when a rank is lost."""
    can_ask = communicator.is_initialized() and membership.can_ask()
    return can_ask and (communicator.size() > 1 or history.takes_newcomers())


def current() -> Resilience:
    """Returns the Resilience of this job. Raises: DependencyError: it needs the part, which is not installed."""
    if not is_possible():
        return _usual
    parts.need("resilience")
    (provided,) = parts.provided("resilience")
    resilience: Resilience = provided()
    return resilience
