"""LearningRateSchedule: multiplies the learning rate from one epoch to another."""

from __future__ import annotations

import numbers
from collections.abc import Callable

import keras

from keras_ddl.callbacks._learning_rate import LearningRateFactor
from keras_ddl.errors import ConfigError

# The lowest factor for a schedule that ends at 0: at a rate of 0, momentum correction would lose the momentum.
_LEAST = 1e-9


class LearningRateSchedule(LearningRateFactor):
    """Multiplies the (warmed-up) learning rate by `multiplier` in the epochs start_epoch <= epoch < end_epoch.

    A sequence of them makes a piecewise schedule; after its last epoch, a schedule's value stays until the next one
    begins, as in Horovod:

        LearningRateWarmup(warmup_epochs=5),
        LearningRateSchedule(1.0, start_epoch=5, end_epoch=30),
        LearningRateSchedule(0.1, start_epoch=30, end_epoch=60),
        LearningRateSchedule(0.01, start_epoch=60),

    If `multiplier` is a schedule object of Keras or `keras_ddl.schedules`, the rate is what the object returns for the
    step, as in an optimizer, times the warm-up's factor. Steps count from start_epoch, so a run that begins at a later
    epoch gets the rate of that epoch. Warm-up, momentum correction and ReduceLROnPlateau work with it.

    A multiplier applies to the optimizer's own rate times the warm-up's factor, never to the previous schedule's
    result. The rate is written only when the product changes. Adds "learning_rate" to the logs of each epoch.

    Args:
        multiplier: a number; or a function of the epoch (0-based; a fraction when `staircase` is False) with equal
            results on all ranks; or a schedule object, which returns rates instead of multipliers.
        start_epoch: first epoch (0-based).
        end_epoch: the first epoch after the schedule; None: no end.
        staircase: True: evaluate once per epoch; False: before every step, with epoch + batch / steps per epoch.
            Default: False for schedule objects.
        initial_lr: the rate that suits one process; default: the optimizer's.
        steps_per_epoch: only needed with staircase=False when fit cannot know it.
        momentum_correction: scale SGD's momentum buffers with the rate; see docs/callbacks.md.
    Raises: ConfigError: bad arguments (when created); a learning rate that is a schedule, or unknown steps per epoch
        (at train begin), on every rank.
    """

    def __init__(
        self,
        multiplier: float | Callable[[float], float] | keras.optimizers.schedules.LearningRateSchedule,
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool | None = None,
        *,
        initial_lr: float | None = None,
        steps_per_epoch: int | None = None,
        momentum_correction: bool = True,
    ) -> None:
        super().__init__(initial_lr, steps_per_epoch, momentum_correction)
        if not callable(multiplier) and not (isinstance(multiplier, numbers.Real) and float(multiplier) > 0):
            raise ConfigError(
                "multiplier must be a number > 0, a function of the epoch that returns one, or a schedule object. "
                f"Received: multiplier={multiplier!r}."
            )
        if start_epoch < 0 or (end_epoch is not None and end_epoch <= start_epoch):
            raise ConfigError(
                "A schedule must have 0 <= start_epoch < end_epoch (None: no end). Received: "
                f"start_epoch={start_epoch!r}, end_epoch={end_epoch!r}."
            )
        self.multiplier = multiplier
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self._is_schedule = isinstance(multiplier, keras.optimizers.schedules.LearningRateSchedule)
        self.staircase = not callable(multiplier) or (not self._is_schedule if staircase is None else staircase)

    def needs_steps(self) -> bool:
        return self._is_schedule or not self.staircase

    def is_active(self, epoch: int) -> bool:
        return self.start_epoch <= epoch and (self.end_epoch is None or epoch < self.end_epoch)

    def factor(self, epoch: int, batch: int) -> float | None:
        if epoch < self.start_epoch:
            return None
        if self.end_epoch is not None and epoch >= self.end_epoch:
            epoch, batch = self.end_epoch - 1, (self.steps() or 1) - 1
        if not callable(self.multiplier):
            return float(self.multiplier)
        if self._is_schedule:
            batches = (epoch - self.start_epoch) * self._known_steps() + (0 if self.staircase else batch)
            rate = float(self.multiplier(batches // self._controller.accumulation))
            assert self._controller.base is not None  # set before it asks for factors
            return max(rate / self._controller.base, _LEAST)
        value = float(self.multiplier(epoch if self.staircase else epoch + batch / self._known_steps()))
        if not value > 0:  # at rate 0, momentum correction would lose the momentum
            raise ConfigError(
                f"multiplier must return a number > 0. Received: {value!r} for epoch {epoch}, batch {batch}."
            )
        return value
