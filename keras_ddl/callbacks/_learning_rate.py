"""The base class of the learning-rate callbacks, and the controller that the callbacks of one optimizer share.

The controller alone writes the rate:

    rate = base * outside * warm-up factor * schedule multiplier

`base` is the optimizer's initial rate, `outside` the product of changes by others (ReduceLROnPlateau, the user). A
factor is a pure function of the position (epoch, batch), so any number of callbacks compose in any order, and a
restored run continues exactly. The rate is written only when a factor changes; in between, others may set it.
"""

from __future__ import annotations

import abc
import numbers
import weakref
from typing import Any

import keras

from keras_ddl.callbacks._momentum import MomentumCorrection
from keras_ddl.communicator.first_rank import is_first_rank
from keras_ddl.communicator.reporting import stack_position
from keras_ddl.compat.models import unwrapped
from keras_ddl.compat.optimizers import learning_rate_source, learning_rate_variable
from keras_ddl.errors import ConfigError
from keras_ddl.schedules import positive
from keras_ddl.state.callback_state import JobCallback

_controllers: weakref.WeakKeyDictionary[Any, LearningRateController] = weakref.WeakKeyDictionary()


def controller_of(optimizer: Any) -> LearningRateController:
    """Returns the optimizer's controller, created at the first call; it lives as long as the optimizer."""
    if optimizer not in _controllers:
        _controllers[optimizer] = LearningRateController(optimizer)
    return _controllers[optimizer]


class LearningRateController:
    """The learning rate of one optimizer. Every rank computes the same rate: nothing here is collective."""

    def __init__(self, optimizer: Any) -> None:
        self._reference = weakref.ref(optimizer)
        self._momentum = MomentumCorrection()
        self._factors: list[LearningRateFactor] = []
        self._fit: Any = None  # identifies the fit() that the factors belong to
        self._opened = False
        self._warned: set[str] = set()
        self._noted = (0.0, 0, True)  # before the callbacks begin: rate, step, whether the rate is a new one
        self._restored = self._must_write = False
        self.base: float | None = None
        self.outside = 1.0
        self.product = 1.0  # the warm-up factor * schedule multiplier in the current rate
        self.last: float | None = None  # the rate last written
        self.seen: float | None = None  # the rate when the last epoch began or ended

    # ---- one fit(), in the order of Keras's calls --------------------------------------------------------------------

    def note(self) -> None:
        """Records the rate before any callback can restore another one (BackupAndRestore does at train begin)."""
        rate = self.read()
        is_new = self.base is None or rate not in (self.last, self.seen)  # the first fit, or set between two fits
        self._noted = (rate, self._steps_done(), is_new)

    def join(self, factor: LearningRateFactor, fit: Any) -> None:
        """Adds a factor; `fit` is the same object for all callbacks of one fit()."""
        if self._fit is not fit:
            self._fit, self._factors, self._opened, self._warned = fit, [], False, set()
        if factor.is_warmup and any(other.is_warmup for other in self._factors):
            raise ConfigError(
                "fit takes only one LearningRateWarmup: two would scale the learning rate twice. Received: 2. "
                "Remove one, or replace the second by LearningRateSchedule."
            )
        self._factors.append(factor)

    def update(self, epoch: int, batch: int) -> None:
        """Writes the rate for the step at this position, if a factor has changed."""
        if not self._opened:
            self._open(epoch)
        product = self._product_at(epoch, batch)
        if product != self.product or self._must_write:
            self._write(product)

    def look(self) -> float:
        """Returns and remembers the rate, so that changes by others in one fit() do not reset `base` in the next."""
        self.seen = self.read()
        return self.seen

    def lower(self, factor: float) -> float:
        """Multiplies the rate permanently: the factor becomes a part of `outside`. Returns the rate."""
        optimizer, now = self._optimizer, self.read()
        optimizer.learning_rate = now * factor
        if now > 0:
            self._momentum.scale(optimizer, self.read() / now)
        if self.base is not None:
            self.outside, self.last = self._outside_of(now) * factor, self.read()
        return self.read()

    # ---- state for checkpoints ---------------------------------------------------------------------------------------

    def state(self) -> dict[str, float] | None:
        """Returns the state for `restore` (JSON), or None when no factor has begun."""
        if self.base is None:
            return None
        return {"base": self.base, "outside": self._outside_of(self.read()), "product": self.product}

    def restore(self, state: dict[str, float]) -> None:
        """Restores a checkpoint's state, after the optimizer's own variables."""
        self.base, self.outside, self.product = state["base"], state["outside"], state["product"]
        self.last = self.read()
        self._restored = True

    # ---- inside ------------------------------------------------------------------------------------------------------

    @property
    def _optimizer(self) -> Any:
        optimizer = self._reference()
        assert optimizer is not None  # `controller_of` drops the controller with its optimizer
        return optimizer

    def read(self) -> float:
        return float(keras.ops.convert_to_numpy(self._optimizer.learning_rate))

    def _open(self, epoch: int) -> None:
        """Sets `base` and `outside` before the first step of a fit()."""
        self._opened = True
        initial_rates = {factor.initial_lr for factor in self._factors if factor.initial_lr is not None}
        if len(initial_rates) > 1:
            raise ConfigError(
                "initial_lr must be the same in all learning-rate callbacks of one fit that set it. Received: "
                f"{sorted(initial_rates)}. Set it in one of them only."
            )
        if self._restored:
            self._restored = False
            return
        rate, steps_done, is_new = self._noted
        if is_new:
            self.base, self.outside, self.product, self.last = rate, 1.0, 1.0, rate
        self.outside, self.last = self._outside_of(rate), rate
        if initial_rates:
            self._must_write = self.base not in initial_rates
            (self.base,) = initial_rates
        if self._steps_done() != steps_done:  # true if another callback restored a checkpoint at train begin
            self._take_over(epoch)

    def _take_over(self, epoch: int) -> None:
        """Computes `outside` from a rate that another callback restored, with the factors of its last position."""
        assert self.base is not None
        self.last = self.read()
        steps = next((s for factor in self._factors if (s := factor.steps())), None)
        positions = [(epoch, 0)]
        if steps and (self._steps_done() - 1) // steps in (epoch - 1, epoch):
            positions.insert(0, divmod(self._steps_done() - 1, steps))
        for position in positions:
            self.product = self._product_at(*position)
            self.outside = self.last / (self.base * self.product)
            if abs(self.outside - 1) < 1e-5:  # unchanged by others, up to float32 rounding
                self.outside = 1.0
                break

    @property
    def accumulation(self) -> int:
        return getattr(self._optimizer, "gradient_accumulation_steps", None) or 1

    def _steps_done(self) -> int:
        return int(keras.ops.convert_to_numpy(self._optimizer.iterations)) * self.accumulation

    def _product_at(self, epoch: int, batch: int) -> float:
        warmup, multiplier, winner = 1.0, 1.0, None
        for factor in self._factors:
            value = factor.factor(epoch, batch)
            if value is None:
                continue
            if factor.is_warmup:
                warmup = value
                continue
            if winner is not None and winner.is_active(epoch):
                if not factor.is_active(epoch):
                    continue
                self._warn(
                    f"Two LearningRateSchedule callbacks set the learning rate in epoch {epoch + 1}: the later one "
                    "in the list wins. Choose start_epoch and end_epoch so that the callbacks do not overlap."
                )
            multiplier, winner = value, factor
        return warmup * multiplier

    def _outside_of(self, rate: float) -> float:
        assert self.base is not None
        return self.outside if rate == self.last else rate / (self.base * self.product)

    def _write(self, product: float) -> None:
        assert self.base is not None
        now = self.read()
        outside = self._outside_of(now)
        if outside != self.outside:
            self._warn(
                f"Only one callback may set the learning rate. Received: a change from {self.last:g} to {now:g}, while "
                f"{', '.join(type(each).__name__ for each in self._factors)} sets it. Warm-up and schedule now "
                "multiply the changed rate. Remove one of the two callbacks, or let the other callback begin after the "
                "warm-up's last epoch."
            )
            self.outside = outside
        optimizer = self._optimizer
        optimizer.learning_rate = self.base * self.outside * product
        self.product, self.last, self._must_write = product, self.read(), False
        if now > 0 and self.last != now and all(factor.momentum_correction for factor in self._factors):
            self._momentum.scale(optimizer, self.last / now)

    def _warn(self, text: str) -> None:
        if text[:40] not in self._warned and is_first_rank():
            stack_position.warn(text)
        self._warned.add(text[:40])


class LearningRateFactor(JobCallback, abc.ABC):
    """A callback that contributes one factor to the learning rate; LearningRateController composes the factors."""

    is_warmup = False
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
        assert self._joined is not None  # on_train_begin refuses a fit without a controller
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
        assert steps is not None  # on_train_begin refuses a fit of unknown steps if needs_steps
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
