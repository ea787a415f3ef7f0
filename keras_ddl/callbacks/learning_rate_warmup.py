"""LearningRateWarmup: raises the learning rate step by step when training begins."""

from __future__ import annotations

import math
import numbers
from typing import Any

from keras_ddl.callbacks._learning_rate import LearningRateFactor
from keras_ddl.communicator.first_rank import is_first_rank
from keras_ddl.errors import ConfigError
from keras_ddl.schedules import Scaling, positive, scale_factor, warmup_factor


class LearningRateWarmup(LearningRateFactor):
    """Raises the learning rate step by step over the first epochs (Goyal et al. 2017).

    With `scaling` it rises to a larger rate, for a batch that has grown with the ranks.

    Step t (0-based, of T = warmup_epochs * steps per epoch) uses initial_lr * (t + 1) / (T + 1), at any number of
    ranks. With `scaling`, the rate rises to k = scale_factor(scaling, size) times the rate of one process:
    initial_lr * (1 + (k - 1) * t / T); from step T on the rate is initial_lr * k.

    The warm-up is a factor: LearningRateSchedule's multipliers apply on top, and if another callback
    (ReduceLROnPlateau) lowers the rate, it stays lower by that factor. The rate is written before a step while it
    changes and never afterwards, so callbacks that set it themselves can take over from epoch `warmup_epochs` on. With
    compile(steps_per_execution=n) it changes every n steps. Adds "learning_rate" to the logs of each epoch.

    Args:
        initial_lr: the rate that suits one process; default: the optimizer's.
        warmup_epochs: length in epochs, which may be a fraction; 0: the full rate from the first step.
        scaling: as in `schedules.scale_factor`: None, "linear", "sqrt" or a number. fit's batch_size is the global one,
            so a script whose batches do not grow with the ranks needs none.
        steps_per_epoch: only needed when fit cannot know it (a dataset of unknown length).
        momentum_correction: scale SGD's momentum buffers with the rate; see docs/callbacks.md.
        verbose: 1: rank 0 prints a line when the warm-up ends.
        start: rate of the first step as a fraction of initial_lr; default: 1 with a scaling, else 1 / (T + 1). For a
            rate that the script has scaled itself: 1 / keras_ddl.size().
    Raises: ConfigError: bad arguments (when created); a learning rate that is a schedule, or unknown steps per epoch
        (at train begin), on every rank.
    """

    is_warmup = True

    def __init__(
        self,
        initial_lr: float | None = None,
        warmup_epochs: float = 5,
        scaling: Scaling = None,
        steps_per_epoch: int | None = None,
        momentum_correction: bool = True,
        verbose: int = 0,
        *,
        start: float | None = None,
    ) -> None:
        super().__init__(initial_lr, steps_per_epoch, momentum_correction)
        self.verbose = verbose
        if not isinstance(warmup_epochs, numbers.Real) or not 0 <= warmup_epochs < math.inf:
            raise ConfigError(f"warmup_epochs must be a number, 0 or more. Received: warmup_epochs={warmup_epochs!r}.")
        self.warmup_epochs: float = warmup_epochs
        self.scaling: Scaling = scaling
        self.start: float | None = None if start is None else positive("start", start)
        scale_factor(scaling)  # raises an error for a bad value here, not in the middle of fit
        self._from: float = 1.0
        self._to: float = 1.0

    def needs_steps(self) -> bool:
        return self.warmup_epochs > 0

    def is_active(self, epoch: int) -> bool:
        return epoch < self.warmup_epochs

    def factor(self, epoch: int, batch: int) -> float:
        if not self.warmup_epochs:
            return self._to
        steps = self._known_steps()
        return warmup_factor((epoch * steps + batch) / (self.warmup_epochs * steps), self._from, self._to)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._to = scale_factor(self.scaling)
        self._from = self._default_start() if self.start is None else self.start
        super().on_train_begin(logs)

    def _default_start(self) -> float:
        """The rate of the first step, as a fraction of initial_lr."""
        return 1.0 if self.scaling is not None else 1 / (self.warmup_epochs * (self.steps() or 0) + 1)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if self.is_active(epoch):
            # The rate at the end of the epoch: logs show round numbers, and the last write comes before any other
            # callback's on_epoch_begin of the first epoch after the warm-up.
            self._controller.update(epoch, self._known_steps())
            if self.verbose and not self.is_active(epoch + 1) and is_first_rank():
                print(
                    f"\nEpoch {epoch + 1}: the learning rate has reached {self._controller.read():g} after its warm-up."
                )
        super().on_epoch_end(epoch, logs)
