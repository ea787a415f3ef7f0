"""DDL's two callbacks for Keras, over keras_ddl.callbacks. Started alone, they do nothing."""

from __future__ import annotations

from typing import Any

from keras_ddl import callbacks
from keras_ddl.ddl import job


class DDLCallback(callbacks.AverageLogs):
    """Averages the logs of the ranks at each epoch's end: losses and metrics are those of all data.

    See keras_ddl.callbacks.AverageLogs. Also keeps XLA from the training step, which communicates.
    """

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        if job.is_training_together() and getattr(model, "jit_compile", False):
            model.jit_compile = False


class DDLGlobalVariablesCallback(callbacks.BroadcastVariables):
    """Gives all ranks rank 0's variables when training begins, those that rank 0 has loaded included.

    See keras_ddl.callbacks.BroadcastVariables.
    """

    def __init__(self) -> None:
        super().__init__(root=0)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._done = job.is_alone()
        if not self._done:
            super().on_train_begin(logs)
