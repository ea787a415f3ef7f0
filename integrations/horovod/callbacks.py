"""Horovod's Keras callbacks, on top of keras_ddl's callbacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from keras_ddl.callbacks import AverageLogs, BroadcastVariables, LearningRateSchedule, LearningRateWarmup
from keras_ddl.communicator.first_rank import is_first_rank
from keras_ddl.compat.tensorflow import tf
from keras_ddl.errors import ConfigError
from keras_ddl.horovod.failures import as_tensorflow_errors
from keras_ddl.schedules import scale_factor

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]


class BroadcastGlobalVariablesCallback(BroadcastVariables):
    """Broadcasts the model's and the optimizer's variables from `root_rank` before the first batch.

    Args:
        root_rank: the rank whose variables all ranks get.
        device: ignored.
        local_variables: a variable or several that stay local to each rank.
    Raises: tf.errors.FailedPreconditionError: (at train begin) the ranks have different lists of variables.
    """

    on_train_begin = as_tensorflow_errors(BroadcastVariables.on_train_begin)
    on_train_batch_begin = as_tensorflow_errors(BroadcastVariables.on_train_batch_begin)

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        one = isinstance(local_variables, (tf.Variable, keras.Variable))
        super().__init__(root_rank, exclude=[local_variables] if one else local_variables or ())

    def register_local_var(self, var: Any) -> None:
        """Adds a variable that stays local to each rank."""
        self.exclude.append(var)


class MetricAverageCallback(AverageLogs):
    """Averages the logs of an epoch over the ranks, weighted by the rows of each rank.

    Put it before callbacks that read the logs. If the steps do not count rows, all ranks have equal weights.

    Args:
        device: ignored.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__(by_rows=True)


class _LogsLr(keras.callbacks.Callback):
    """Adds Horovod's key for the rate to the logs, in addition to Keras's "learning_rate"."""

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        if logs is not None:
            logs["lr"] = logs["learning_rate"]


class LearningRateScheduleCallback(_LogsLr, LearningRateSchedule):
    """Sets the rate to `initial_lr` times `multiplier` in the epochs start_epoch <= epoch < end_epoch.

    Args:
        initial_lr: the rate at train begin; equal in all such callbacks of a fit.
        multiplier: a number, or a function of the epoch.
        start_epoch, end_epoch: from 0; end_epoch None: no end.
        staircase: True: once per epoch. False: before every batch, with epoch + batch / steps_per_epoch.
        momentum_correction: scale momentum buffers with the rate (docs/callbacks.md).
        steps_per_epoch: only needed with staircase=False when fit cannot know it.
    Raises: ConfigError: as `keras_ddl.callbacks.LearningRateSchedule`.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__(
            multiplier,
            start_epoch,
            end_epoch,
            staircase,
            initial_lr=_required(initial_lr),
            steps_per_epoch=steps_per_epoch,
            momentum_correction=momentum_correction,
        )


class LearningRateWarmupCallback(_LogsLr, LearningRateWarmup):
    """Raises the rate from initial_lr / size to initial_lr over `warmup_epochs`, before every batch.

    Args:
        initial_lr: the rate for all ranks together, already scaled by the script.
        warmup_epochs, momentum_correction, steps_per_epoch: as in `keras_ddl.callbacks.LearningRateWarmup`.
        verbose: 1: rank 0 prints a line at the end.
    Raises: ConfigError: as `keras_ddl.callbacks.LearningRateWarmup`.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: float = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        super().__init__(_required(initial_lr), warmup_epochs, None, steps_per_epoch, momentum_correction, verbose)

    def _default_start(self) -> float:
        return 1 / scale_factor("linear")


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """Saves the model on rank 0 when the monitored value is the best so far.

    Args:
        monitor, verbose, save_weights_only, mode, save_freq: as in keras.callbacks.ModelCheckpoint.
        filepath: may also be set later, as an attribute, before training.
    Raises: ConfigError: (at train begin) filepath is not set.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: str | int = "epoch",
        filepath: str | None = None,
    ) -> None:
        checked = filepath or ("best.weights.h5" if save_weights_only else "best.keras")
        super().__init__(
            checked,
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )
        self.filepath = None if filepath is None else checked

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        if self.filepath is None:
            raise ConfigError(
                "BestModelCheckpoint must know where to save. Received: filepath=None. Pass "
                "BestModelCheckpoint(filepath='best.keras'), or set callback.filepath before fit."
            )
        super().on_train_begin(logs)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if is_first_rank():
            super().on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if is_first_rank():
            super().on_epoch_end(epoch, logs)


def _required(initial_lr: Any) -> Any:
    if initial_lr is None:
        raise ConfigError("initial_lr must be given: the learning rate when training begins. Received: None.")
    return initial_lr
