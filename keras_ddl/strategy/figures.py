"""The interface through which a watched training reports steps, rows and logs. A part implements it (parts.py)."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Protocol

from keras_ddl import parts
from keras_ddl.link import program
from keras_ddl.strategy.base import strategy_of


class JobFigures(Protocol):
    """Counts what this process has trained. Its methods are called on all ranks."""

    rows: float  # of all ranks together, in the program's own loops

    def begin_step(self) -> None:
        """Called when a step of a loop begins."""

    def end_step(self) -> bool:
        """Called when a step has ended. Returns whether `write` is due."""

    def write(self) -> None:
        """Writes the figures for the launcher."""

    def of_fit(self, model: Any, strategy: Any) -> FitFigures:
        """Returns the figures of a fit that begins."""


class FitFigures(Protocol):
    """Counts what one fit has trained. Its methods are called on all ranks, together with the callbacks."""

    def begin_batch(self, batch: int) -> None: ...

    def end_batch(self, batch: int, epoch: int, logs: Mapping[str, Any] | None) -> None: ...

    def end_epoch(self, epoch: int, logs: Mapping[str, Any] | None) -> None: ...

    def end_fit(self) -> None: ...


@functools.cache
def current() -> JobFigures | None:
    """Returns the figures of this process; None if nobody watches its job."""
    link = program.current()
    if link is None or not link.job_fact("figures"):
        return None
    return next((count() for count in parts.provided("training_figures")), None)


def of_fit(model: Any) -> FitFigures | None:
    """Returns the figures of a fit that begins; None if nobody watches the job or `model` has no keras_ddl.Strategy."""
    counted, strategy = current(), strategy_of(model)
    return None if counted is None or strategy is None else counted.of_fit(model, strategy)
