"""The figures of a training (steps, rows, logs) for those who watch its job. A part counts them (parts.py)."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Protocol

from keras_ddl import config, parts
from keras_ddl.files import news
from keras_ddl.strategy.interface import strategy_of


class JobFigures(Protocol):
    """What this process has trained. Its methods are called on all ranks."""

    rows: float  # of all ranks together, in loops of the program's own

    def begin_step(self) -> None:
        """A step of a loop begins."""

    def end_step(self) -> bool:
        """It has ended. Returns whether `write` is due."""

    def write(self) -> None:
        """Writes the figures for the launcher."""

    def of_fit(self, model: Any, strategy: Any) -> FitFigures:
        """A fit begins."""


class FitFigures(Protocol):
    """The figures of one fit. Its methods are called on all ranks, beside those of callbacks."""

    def begin_batch(self, batch: int) -> None: ...

    def end_batch(self, batch: int, epoch: int, logs: Mapping[str, Any] | None) -> None: ...

    def end_epoch(self, epoch: int, logs: Mapping[str, Any] | None) -> None: ...

    def end_fit(self) -> None: ...


@functools.cache
def of_job() -> JobFigures | None:
    """Returns the figures of this process; None: nobody watches its job."""
    run_dir = config.get("RUN_DIR")
    if not news.is_wanted(run_dir, news.FIGURES):
        return None
    return next((count(run_dir) for count in parts.provided("training_figures")), None)


def of_fit(model: Any) -> FitFigures | None:
    """Returns the figures of a fit that begins; None: nobody watches the job, or `model` has no keras_ddl.Strategy."""
    counted, strategy = of_job(), strategy_of(model)
    return None if counted is None or strategy is None else counted.of_fit(model, strategy)
