"""StepMetrics: writes the job's speed and waiting times as scalars for TensorBoard."""

from __future__ import annotations

import os
import time
import warnings
from typing import Any

from keras_ddl import communicator, timeline
from keras_ddl.communicator.first_rank import is_first_rank
from keras_ddl.compat import keras as keras_compat
from keras_ddl.compat import models
from keras_ddl.compat.tensorflow import tf
from keras_ddl.errors import ConfigError
from keras_ddl.state.callback_state import JobCallback
from keras_ddl.timeline import steps


class StepMetrics(JobCallback):
    """Writes scalars for TensorBoard on rank 0, each the mean over the last `every` steps:

    - `job/step_seconds`: from the beginning of a step to the beginning of the next.
    - `job/rows_per_second`: rows of all ranks together.
    - `job/exposed_communication_seconds`: the part of a step in which rank 0 only waited for collectives; an upper
      bound, see observe/timeline/docs/timeline.md.
    - `job/input_wait_seconds`: the part of a step until rank 0 had its rows of the batch.

    The last two need a keras_ddl.Strategy on several ranks. Without a Strategy, rows need a `train_step` that counts
    them, as Keras's own does. The first step of a fit, in which TensorFlow traces, is not counted. The horizontal axis
    is the optimizer's steps.

    Args:
        log_dir: as in keras.callbacks.TensorBoard, which may use the same directory.
        every: steps per point, 1 or more.

    If its file cannot be written, as on a full disk, it warns and writes nothing more; training continues.

    Cost: on rank 0 as a timeline, a few microseconds per collective and per point; on other ranks nothing.

    Raises:
        ConfigError: `every` is not a number of steps.
    """

    def __init__(self, log_dir: str | os.PathLike[str], every: int = 10) -> None:
        super().__init__()
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise ConfigError(f"StepMetrics: every must be a number of steps, 1 or more. Received: every={every!r}.")
        self.log_dir = os.fspath(log_dir)
        self.every = every
        self._writer: Any = None
        self._is_lost = False  # whether the file can no longer be written
        self._forget()

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._is_lost = False
        if is_first_rank():
            self._begin_writing()

    def _begin_writing(self) -> None:
        try:
            self._writer = tf.summary.create_file_writer(self.log_dir)
        except tf.errors.OpError as error:
            self._lose(error)
            return
        self._done = models.steps_taken(models.optimizers_of(self.model)) or 0
        self._is_first = True
        self._forget()
        if communicator.is_initialized():
            timeline.keep()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._batches = 0

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self._writer is None:
            if not is_first_rank() or self._is_lost:
                return
            self._begin_writing()  # this rank has replaced the lost rank 0
            if self._is_lost:
                return
            self._batches = batch
        # The time of a step is known only when the next one begins.
        if sum(self._counts) >= self.every:
            self._write()
            if self._is_lost:
                return
        if not self._spans:
            self._rows = self._rows_trained()
        self._begin = time.monotonic()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self._writer is None:
            return
        executed, self._batches = batch + 1 - self._batches, batch + 1
        self._done += executed
        if self._is_first:
            self._is_first = False
            self._taken()
            return
        self._spans.append((self._begin, time.monotonic(), batch))
        self._counts.append(executed)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if self._writer is not None:
            self._write()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        if self._writer is not None:
            self._stop_keeping()
            try:
                self._writer.close()
            except tf.errors.OpError as error:
                self._lose(error)
            self._writer = None

    def _lose(self, error: Exception) -> None:
        self._is_lost, self._writer = True, None
        self._stop_keeping()
        warnings.warn(f"StepMetrics writes nothing more to {self.log_dir}: {error}", stacklevel=2)

    @staticmethod
    def _stop_keeping() -> None:
        if communicator.is_initialized():
            timeline.keep(0)

    def _write(self) -> None:
        spans = steps.steps_of_spans(self._spans, self._taken())
        if spans:
            count, seconds = sum(self._counts), sum(step.total for step in spans)
            values = {"step_seconds": seconds / count}
            rows = self._rows_trained() - self._rows
            if rows > 0:
                values["rows_per_second"] = rows / seconds
            if keras_compat.strategy_of(self.model) is not None and communicator.size() > 1:
                values["exposed_communication_seconds"] = sum(step.waiting for step in spans) / count
                values["input_wait_seconds"] = sum(step.input for step in spans) / count
            try:
                with self._writer.as_default(step=self._done):
                    for name, value in values.items():
                        _scalar(f"job/{name}", value)
                self._writer.flush()
            except tf.errors.OpError as error:
                self._lose(error)
        self._forget()

    @staticmethod
    def _taken() -> list[timeline.Collective]:
        return timeline.take() if communicator.is_initialized() else []

    def _rows_trained(self) -> float:
        strategy = keras_compat.strategy_of(self.model)
        if strategy is not None and strategy.size > 1:
            return int(strategy.keras_steps.rows_trained)
        return models.rows_counted(self.model)

    def _forget(self) -> None:
        self._spans: list[tuple[float, float, int]] = []
        self._counts: list[int] = []  # steps of each span
        self._rows = 0.0


def _scalar(name: str, value: float) -> None:
    """Works like tf.summary.scalar, which needs the package tensorboard even for writing."""
    metadata = tf.compat.v1.SummaryMetadata(plugin_data={"plugin_name": "scalars"})
    tf.summary.write(name, tf.constant(value, tf.float32), metadata=metadata)
