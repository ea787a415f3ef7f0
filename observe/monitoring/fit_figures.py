"""The figures of a fit, for those who watch the job (figures.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from keras_ddl.communicator.first_rank import is_first_rank
from keras_ddl.compat import models

if TYPE_CHECKING:
    from keras_ddl.monitoring.figures import Figures


class FitFigures:
    """Counts the steps of one fit. Its methods are called on all ranks, beside those of callbacks."""

    def __init__(self, model: Any, strategy: Any, of_job: Figures) -> None:
        self._model, self._strategy, self._of_job = model, strategy, of_job
        self._batch = 0
        self._rows_of_epochs = of_job.rows_of_fits  # where one rank trains: until this epoch

    def begin_batch(self, batch: int) -> None:
        self._batch = batch
        self._of_job.begin_step()

    def end_batch(self, batch: int, epoch: int, logs: Mapping[str, Any] | None) -> None:
        if self._of_job.end_step(batch + 1 - self._batch):
            self._write(epoch, logs)

    def end_epoch(self, epoch: int, logs: Mapping[str, Any] | None) -> None:
        """With the logs of a validation, which are written with the next step."""
        self._count_rows()
        self._rows_of_epochs = self._of_job.rows_of_fits
        self._of_job.note_logs(logs)
        self._of_job.epoch = epoch

    def end_fit(self) -> None:
        self._of_job.end_fit()
        if is_first_rank():
            self._of_job.write()

    def _write(self, epoch: int, logs: Mapping[str, Any] | None) -> None:
        self._count_rows()
        self._of_job.note_logs(logs)
        self._of_job.epoch = epoch
        self._of_job.write()

    def _count_rows(self) -> None:
        if self._strategy.is_several:
            self._of_job.rows_of_fits = int(self._strategy.keras_steps.rows_trained)
        else:  # Keras counts those of an epoch
            self._of_job.rows_of_fits = self._rows_of_epochs + models.rows_counted(self._model)
