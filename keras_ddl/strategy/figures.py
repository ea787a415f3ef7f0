"""The interface through which watched training reports steps, rows and logs. A part implements it (parts.py)."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Protocol

from keras_ddl import parts
from keras_ddl.link import program
from keras_ddl.strategy.base import strategy_of


class JobFigures(Protocol):
    """Counts the steps and rows that this process has trained. Called on all ranks."""

    rows: float  # of all ranks together, in the program's own loops

    def begin_step(self) -> None:
        """Called when a step of a loop begins."""

    def end_step(self) -> bool:
        """Called when a step has ended. Returns whether `write` is due."""

    def write(self) -> None:
        """Writes the figures for the launcher."""

    def of_fit(self, model: Any, strategy: Any) -> FitFigures:
        """Returns the figures for a fit that is beginning."""


class FitFigures(Protocol):
    """Counts the steps and rows of one fit. Called on all ranks, together with the callbacks."""

    def begin_batch(self, batch: int) -> None: ...

    def end_batch(self, batch: int, epoch: int, logs: Mapping[str, Any] | None) -> None: ...

    def end_epoch(self, epoch: int, logs: Mapping[str, Any] | None) -> None: ...

    def end_fit(self) -> None: ...


@functools.cache
def current() -> JobFigures | None:
    """Returns the figures of this process; None if its job has no watcher."""
    link = program.current()
    if link is None or not link.job_fact("figures"):
        return None
    return next((count() for count in parts.provided("training_figures")), None)


def of_fit(model: Any) -> FitFigures | None:
    """Returns the figures for a new fit; None without a watcher, or if `model` has no keras_ddl.Strategy."""
    counted, strategy = current(), strategy_of(model)
    return None if counted is None or strategy is None else counted.of_fit(model, strategy)
