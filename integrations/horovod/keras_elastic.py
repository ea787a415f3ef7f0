"""horovod.tensorflow.keras.elastic: a state for `fit`, and callbacks that update and commit it."""

from __future__ import annotations

from typing import Any

import keras

from keras_ddl.horovod.elastic import (
    HorovodInternalError,
    HostsUpdatedInterrupt,
    ObjectState,
    State,
    TensorFlowKerasState,
    TensorFlowState,
    run,
)
from keras_ddl.state.callback_state import JobCallback
from keras_ddl.strategy import keras_patches
from keras_ddl.strategy.calls import fits

__all__ = [
    "CommitStateCallback",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "KerasState",
    "ObjectState",
    "State",
    "TensorFlowKerasState",
    "TensorFlowState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]


class KerasState(TensorFlowKerasState):
    """The state of a compiled model in `fit`: `KerasState(model, batch=0, epoch=0)`.

    Args:
        model, optimizer, kwargs: as in TensorFlowKerasState.
    """

    def __init__(self, model: keras.Model, optimizer: Any = None, **kwargs: Any) -> None:
        super().__init__(model, optimizer=optimizer, backend=keras.backend, **kwargs)


class CommitStateCallback(JobCallback):
    """Commits `state` after every `batches_per_commit` batches, after each epoch and at the end.

    It commits just before the next batch or epoch begins. All callbacks have processed the last one by then, so the
    order of callbacks does not matter.

    Args:
        state: the state to commit.
        batches_per_commit: number of batches between commits.
    """

    def __init__(self, state: State, batches_per_commit: int = 1) -> None:
        super().__init__()
        self.state, self.batches_per_commit = state, batches_per_commit
        self._remaining, self._is_due = batches_per_commit, False

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._remaining, self._is_due = self.batches_per_commit, False

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._remaining -= 1
        if self._remaining <= 0:
            self._remaining, self._is_due = self.batches_per_commit, True

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._commit_if_due()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._is_due = True

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._commit_if_due()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self.state.save()
        self.state.write_commit()  # changes of the hosts no longer matter

    def commit(self) -> None:
        """Calls `state.commit()`. COLLECTIVE."""
        self.state.commit()

    def _commit_if_due(self) -> None:
        if self._is_due:
            self._is_due = False
            self.commit()


class UpdateBatchStateCallback(JobCallback):
    """Counts the finished batches of the epoch in `state.batch`, and skips that many when a fit begins.

    The first epoch of a fit is then shorter by these batches, which are read and dropped; the script determines the
    order of the data. Between epochs `state.batch` is 0.

    Args:
        state: a state with an attribute `batch`.
    """

    def __init__(self, state: State) -> None:
        super().__init__()
        self.state: Any = state  # its attributes are the program's
        keras_patches.install()

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        reading = fits.reading_of(self.model)
        if self.state.batch and reading is not None:
            reading.go_to(reading.position(0, self.state.batch))

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self.state.batch = batch + 1

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self.state.batch = 0


class UpdateEpochStateCallback(keras.callbacks.Callback):
    """Counts the finished epochs in `state.epoch`, over all fits of this state.

    Args:
        state: a state with an attribute `epoch`.
    """

    def __init__(self, state: State) -> None:
        super().__init__()
        self.state: Any = state  # its attributes are the program's

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self.state.epoch += 1
