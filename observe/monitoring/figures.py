"""Reports the progress of a training once a second, for `keras-ddl run --metrics-port` (metrics.py).

Only the first rank sends figures. The other ranks count as well, because each of them may become the first.
"""

from __future__ import annotations

import atexit
import random
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from keras_ddl import communicator, parts
from keras_ddl.communicator.first_rank import is_first_rank
from keras_ddl.compat import models
from keras_ddl.link import program
from keras_ddl.link.kinds import Kind

_EVERY_SECONDS = 1.0

if TYPE_CHECKING:
    from keras_ddl.timeline.sampling import StepSample


class Figures:
    """Counts steps and rows of all fits and training loops of this process.

    Attributes:
        rows: the rows of all ranks in the program's own training loops.
        rows_of_fits: the rows of all ranks in fits, as last counted.
        logs: the newest logs of fit.
        epoch: the epoch of fit, from 0; None: no fit has begun.

    Cost: 0.2 us per step, and about 20 to 100 us per second on the first rank (observe/monitoring/docs/monitoring.md).
    """

    def __init__(self) -> None:
        self.rows, self.rows_of_fits = 0.0, 0.0
        self.logs: dict[str, float] = {}
        self.epoch: int | None = None
        self._steps, self._executions = 0, 0
        self._exposed = 0.0
        self._sample: StepSample | None = None
        # Random, because a second often ends between two epochs, and the next steps are not typical.
        self._steps_until_sample: int | None = None
        self._chance = random.Random()  # leaves the program's random numbers alone
        self._executions_at_write, self._executions_at_sample = 0, 0
        self._write_at = 0.0
        self._is_written: bool | None = None  # None: not tried yet
        atexit.register(self._write_last)

    def begin_step(self) -> None:
        """Called when a step begins, or an execution of several steps."""
        if self._sample is not None:
            self._end_sample()
        elif self._steps_until_sample is not None:
            self._steps_until_sample -= 1
            if self._steps_until_sample < 0:
                self._steps_until_sample, self._sample = None, _sample()

    def end_step(self, steps: int = 1) -> bool:
        """Called when the steps have ended. Returns whether `write` is due: once a second on the first rank."""
        self._steps += steps
        self._executions += 1
        if self._sample is not None:
            self._sample.step_ended()
        if self._is_written:
            self._is_written = False
        return time.monotonic() >= self._write_at and is_first_rank()

    def of_fit(self, model: Any, strategy: Any) -> FitFigures:
        """Returns the figures of a fit that begins."""
        return FitFigures(model, strategy, self)

    def note_logs(self, logs: Mapping[str, Any] | None) -> None:
        """Keeps those logs that are numbers."""
        numbers = {str(name): _number(value) for name, value in (logs or {}).items()}
        self.logs |= {name: number for name, number in numbers.items() if number is not None}

    def end_fit(self) -> None:
        """Ends the current sample, because there might not be another step. Its collectives are then no longer kept."""
        if self._sample is not None:
            self._end_sample()

    def write(self) -> None:
        """Sends the figures to the launcher. Only the first rank calls it."""
        figures = {"steps": self._steps, "rows": self.rows + self.rows_of_fits, "logs": self.logs, "epoch": self.epoch}
        if communicator.is_initialized() and communicator.size() > 1:
            figures["exposed"] = self._exposed
            if self._sample is None:
                self._steps_until_sample = self._chance.randrange(self._executions - self._executions_at_write or 1)
        program.tell(Kind.FIGURES, figures)
        self._is_written, self._executions_at_write = True, self._executions
        self._write_at = time.monotonic() + _EVERY_SECONDS

    def _write_last(self) -> None:
        if self._is_written is False:  # only on the first rank
            program.tell(Kind.FIGURES, {"steps": self._steps, "rows": self.rows + self.rows_of_fits})

    def _end_sample(self) -> None:
        assert self._sample is not None
        waiting, self._sample = self._sample.end(), None
        if waiting is not None:
            self._exposed += waiting * (self._executions - self._executions_at_sample)
        self._executions_at_sample = self._executions


class FitFigures:
    """Counts the steps of one fit. Its methods are called on all ranks at the same points as those of callbacks."""

    def __init__(self, model: Any, strategy: Any, job: Figures) -> None:
        self._model, self._strategy, self._job = model, strategy, job
        self._batch = 0
        self._rows_of_epochs = job.rows_of_fits  # on one rank: until this epoch

    def begin_batch(self, batch: int) -> None:
        self._batch = batch
        self._job.begin_step()

    def end_batch(self, batch: int, epoch: int, logs: Mapping[str, Any] | None) -> None:
        if self._job.end_step(batch + 1 - self._batch):
            self._write(epoch, logs)

    def end_epoch(self, epoch: int, logs: Mapping[str, Any] | None) -> None:
        """Takes the logs of the epoch, including validation logs, which are written with the next step."""
        self._count_rows()
        self._rows_of_epochs = self._job.rows_of_fits
        self._job.note_logs(logs)
        self._job.epoch = epoch

    def end_fit(self) -> None:
        self._job.end_fit()
        if is_first_rank():
            self._job.write()

    def _write(self, epoch: int, logs: Mapping[str, Any] | None) -> None:
        self._count_rows()
        self._job.note_logs(logs)
        self._job.epoch = epoch
        self._job.write()

    def _count_rows(self) -> None:
        if self._strategy.is_several:
            self._job.rows_of_fits = int(self._strategy.keras_steps.rows_trained)
        else:  # Keras counts the rows of an epoch
            self._job.rows_of_fits = self._rows_of_epochs + models.rows_counted(self._model)


def _sample() -> StepSample | None:
    if parts.is_missing("timeline"):
        return None  # the metrics lack exposed communication
    from keras_ddl.timeline.sampling import StepSample

    return StepSample()


def _number(value: object) -> float | None:
    try:
        return float(value) if np.ndim(value) == 0 else None  # type: ignore[arg-type]
    except (TypeError, ValueError):  # such as the dict of a model's compiled metrics
        return None
