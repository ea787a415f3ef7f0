"""DDL's two callbacks for Keras, on top of keras_ddl.callbacks. In a process without other ranks they do nothing."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from keras_ddl import callbacks
from keras_ddl.ddl import job
from keras_ddl.errors import ConfigError


def _only_on_objects(method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a method that raises a clear error if the script passed the class instead of an object."""

    @functools.wraps(method)
    def checked(self: Any, *args: Any) -> Any:
        if not args:  # called on the class
            name = method.__qualname__.partition(".")[0]
            raise ConfigError(
                f"A callback must be an object. Received: the class {name}. Write {name}(), with parentheses."
            )
        return method(self, *args)

    return checked


class DDLCallback(callbacks.AverageLogs):
    """Averages the logs of the ranks at the end of each epoch, so that losses and metrics are those of all data.

    See keras_ddl.callbacks.AverageLogs. It also turns XLA off for the training step, because the step communicates.
    """

    @_only_on_objects
    def set_model(self, model: Any) -> None:
        super().set_model(model)
        if job.is_training_together() and getattr(model, "jit_compile", False):
            model.jit_compile = False


class DDLGlobalVariablesCallback(callbacks.BroadcastVariables):
    """Gives all ranks rank 0's variables when training begins, including those that rank 0 has loaded.

    See keras_ddl.callbacks.BroadcastVariables.
    """

    def __init__(self) -> None:
        super().__init__(root=0)

    @_only_on_objects
    def set_model(self, model: Any) -> None:
        super().set_model(model)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._done = job.is_alone()
        if not self._done:
            super().on_train_begin(logs)
