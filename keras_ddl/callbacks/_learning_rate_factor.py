"""The base of the learning-rate callbacks: joins the optimizer's controller and reports the position in training."""

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
    """A callback that contributes one factor to the learning rate; LearningRateController composes the factors."""

    is_warmup = False
    never_stops_within_epoch = True  # saves the ranks an agreement per batch
    params: dict[str, Any] | None

    def __init__(self, initial_lr: float | None, steps_per_epoch: int | None, momentum_correction: bool) -> None:
        super().__init__()
        self.initial_lr = None if initial_lr is None else positive("initial_lr", initial_lr)
        if steps_per_epoch is not None and not (isinstance(steps_per_epoch, numbers.Integral) and steps_per_epoch > 0):
            raise ConfigError(
                f"steps_per_epoch must be a whole number, 1 or more. Received: steps_per_epoch={steps_per_epoch!r}."
            )
        self.steps_per_epoch = steps_per_epoch
        self.momentum_correction = momentum_correction
        self._joined: LearningRateController | None = None
        self._epoch = 0

    @property
    def _controller(self) -> LearningRateController:
        assert self._joined is not None  # on_train_begin refuses a fit without one
        return self._joined

    # ---- for the controller ------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def factor(self, epoch: int, batch: int) -> float | None:
        """The factor at this batch; None before its first epoch."""

    @abc.abstractmethod
    def is_active(self, epoch: int) -> bool:
        """Whether the epoch is within its range."""

    def steps(self) -> int | None:
        """Steps per epoch: the argument, else fit's; None: unknown."""
        return self.steps_per_epoch or (self.params or {}).get("steps")

    def _known_steps(self) -> int:
        steps = self.steps()
        assert steps is not None  # on_train_begin refuses a fit without, if needs_steps
        return steps

    @abc.abstractmethod
    def needs_steps(self) -> bool:
        """Whether the factor changes within an epoch."""

    # ---- for Keras ---------------------------------------------------------------------------------------------------

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        optimizer = getattr(model, "optimizer", None)
        if optimizer is not None:
            inner = unwrapped(optimizer)
            self._joined = controller_of(inner) if learning_rate_variable(inner) is not None else None
            if self._joined is not None:
                self._joined.note()

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        name = type(self).__name__
        if self._joined is None:
            raise ConfigError(
                f"{name} needs an optimizer whose learning rate is a number. Received: "
                f"{_describe_rate(self.model)}. Compile with a number, or use a schedule of keras_ddl.schedules in the "
                "optimizer and remove the callback."
            )
        if self.needs_steps() and not self.steps():
            raise ConfigError(
                f"{name} must know the steps per epoch, but for this data fit does not know them before the first "
                f"epoch ends. Received: steps_per_epoch=None. Pass {name}(..., steps_per_epoch=N) or fit(..., "
                "steps_per_epoch=N)."
            )
        self._joined.join(self, self.params)

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


def _describe_rate(model: Any) -> str:
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        return "a model that is not compiled"
    optimizer = unwrapped(optimizer)
    return f"{type(optimizer).__name__} with a {type(learning_rate_source(optimizer)).__name__}"
