"""The base of the learning-rate callbacks: joins the optimizer's controller and tells it the position in training."""

from __future__ import annotations

import abc
import numbers
from typing import Any

import keras

from keras_ddl.callbacks._learning_rate_controller import LearningRateController, controller_of
from keras_ddl.compat.models import unwrapped
from keras_ddl.compat.optimizers import learning_rate_source, learning_rate_variable
from keras_ddl.errors import ConfigError
from keras_ddl.schedules import positive


class LearningRateFactor(keras.callbacks.Callback, abc.ABC):
    """A callback that contributes one factor to the learning rate; see LearningRateController for how they compose."""

    is_warmup = False
    never_stops_within_epoch = True  # spares the ranks an agreement in every batch

    def __init__(self, initial_lr: float | None, steps_per_epoch: int | None, momentum_correction: bool) -> None:
        super().__init__()
        self.initial_lr = None if initial_lr is None else positive("initial_lr", initial_lr)
        if steps_per_epoch is not None and not (isinstance(steps_per_epoch, numbers.Integral) and steps_per_epoch > 0):
            raise ConfigError(
                f"steps_per_epoch must be a whole number, 1 or more. Received: steps_per_epoch={steps_per_epoch!r}."
            )
        self.steps_per_epoch = steps_per_epoch
        self.momentum_correction = momentum_correction
        self._controller: LearningRateController | None = None
        self._epoch = 0

    # ---- what the controller asks ------------------------------------------------------------------------------------

    @abc.abstractmethod
    def factor(self, epoch: int, batch: int) -> float | None:
        """What the rate is multiplied by at this batch; None before its first epoch."""

    @abc.abstractmethod
    def is_active(self, epoch: int) -> bool:
        """Whether this epoch is one of its own."""

    def steps(self) -> int | None:
        """Steps per epoch: the argument, else what fit knows; None when neither does."""
        return self.steps_per_epoch or (self.params or {}).get("steps")

    @abc.abstractmethod
    def needs_steps(self) -> bool:
        """Whether the factor changes within an epoch."""

    # ---- what Keras calls --------------------------------------------------------------------------------------------

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        optimizer = getattr(model, "optimizer", None)
        if optimizer is not None:
            inner = unwrapped(optimizer)
            self._controller = controller_of(inner) if _is_settable(inner) else None
            if self._controller is not None:
                self._controller.note()

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        name = type(self).__name__
        if self._controller is None:
            raise ConfigError(
                f"{name} needs an optimizer whose learning rate is a number. Received: "
                f"{_describe_rate(self.model)}. Compile with a number, or build the whole curve into the optimizer "
                "with keras_ddl.schedules and remove the callback."
            )
        if self.needs_steps() and not self.steps():
            raise ConfigError(
                f"{name} must know the steps per epoch, and fit does not know them for this data before the first "
                f"epoch ends. Received: steps_per_epoch=None. Pass {name}(..., steps_per_epoch=N) or "
                "fit(..., steps_per_epoch=N)."
            )
        self._controller.join(self, self.params)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._epoch = epoch
        self._controller.look()

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._controller.update(self._epoch, batch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is not None:
            logs["learning_rate"] = self._controller.look()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self._controller.look()


def _is_settable(optimizer: Any) -> bool:
    return learning_rate_variable(optimizer) is not None


def _describe_rate(model: Any) -> str:
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        return "a model that is not compiled"
    optimizer = unwrapped(optimizer)
    return f"{type(optimizer).__name__} with a {type(learning_rate_source(optimizer)).__name__}"
