"""Where the part `resilience` meets a training: everything that a Strategy asks of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keras_ddl import communicator, parts
from keras_ddl.communicator.newcomers import history
from keras_ddl.communicator.transports import membership


class Joining:
    """How ranks join a job. No rank joins this one, and nothing here does anything.

    Attributes:
        has_newcomers: ranks have joined at some time; equal on all ranks between the same two calls.
    """

    has_newcomers = False

    def begin_fit(self, callbacks: Any) -> None:
        """Called when training begins, after on_train_begin of all callbacks. A rank that joins becomes one of the
        ranks here. COLLECTIVE in that case."""

    def begin_epoch(self) -> bool:
        """Returns whether this rank begins an epoch that the others are already in."""
        return False

    def between_steps(self, caller: Any) -> None:
        """Called before each step of fit. Ranks join and leave here. COLLECTIVE in that case."""

    def check_batch(self, batch: Any) -> None:
        """Called with each batch of fit before its step. Checks that ranks that have joined read what the others
        read."""

    def prove(self, callbacks: Any) -> None:
        """Checks that ranks that have joined hold what the others hold. COLLECTIVE if there are such ranks."""

    def end_fit(self) -> None:
        """Called when training has ended."""


class Resilience:
    """A job that ends when a rank is lost, and that no rank joins: nothing here does anything.

    The part derives from both classes (resilience/survival.py, resilience/joining_state.py).
    """

    joining: Joining = Joining()

    def finished(self) -> int:
        """Returns how many of the calls that all ranks make this rank has finished."""
        return 0

    def call(self, run: Callable[[], Any], variables: Callable[[], list[Any]] = list, caller: Any = None) -> Any:
        """Returns `run()`, a call that all ranks make; repeats it while ranks are lost. COLLECTIVE.

        Args:
            variables: returns the variables that `run` may write. caller: that of the step that `run` runs, if any.
        """
        return run()

    def call_of_trainer(
        self, method: str, model: Any, call: Callable[[], Any], callbacks: Callable[[], list[Any]] = list
    ) -> Any:
        """Returns `call()`, a call of the method fit, evaluate or predict. callbacks: returns those that it was given.

        A rank that joins gets what the call has returned if the others have ended it.
        """
        return call()


_usual = Resilience()


def is_possible() -> bool:
    """Whether this job continues when a rank is lost."""
    can_ask = communicator.is_initialized() and membership.can_ask()
    return can_ask and (communicator.size() > 1 or history.takes_newcomers())


def of_job() -> Resilience:
    """Returns the Resilience of this job. Raises: DependencyError: it needs the part, which is not installed."""
    if not is_possible():
        return _usual
    parts.need("resilience")
    (of_part,) = parts.provided("resilience")
    resilience: Resilience = of_part()
    return resilience
