"""DivergenceGuard: stops a training that diverges, or continues it from an earlier state with a lower rate."""

from __future__ import annotations

import math
import numbers
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_ddl import communicator
from keras_ddl.callbacks._last_good import InMemorySnapshots, SavedSnapshots, step_of
from keras_ddl.callbacks._learning_rate import controller_of
from keras_ddl.callbacks._momentum import MomentumCorrection
from keras_ddl.communicator.reporting import stack_position
from keras_ddl.compat.models import optimizers_with_rates
from keras_ddl.compat.optimizers import learning_rate_variable
from keras_ddl.errors import ConfigError
from keras_ddl.schedules import positive
from keras_ddl.state.callback_state import JobCallback
from keras_ddl.strategy.agreement.training_state import build_optimizer
from keras_ddl.strategy.keras_patches.trainer import stop_on_all_ranks

_LEAST = 0.01  # fraction of the first window's loss; a smaller rise is noise


class DivergenceGuard(JobCallback):
    """Watches the mean loss of all ranks over windows of steps. All ranks take the same action.

    A window is bad when its loss

    - is not finite,
    - exceeds the lowest loss of an earlier window by more than `rise` times that loss (or `rise` times 1 % of the first
      window's loss, if that is more), or
    - is not below `ceiling` after `grace` windows, counted from the start or from the last time training went back.

    Then `action` is taken:

    - "stop": training stops on all ranks, and the weights stay unchanged.
    - "go_back": weights and optimizers go back to the last state that was followed by a good window, the learning rate
      is multiplied by `factor`, and training continues with the next data; the metrics of the epoch are reset. After it
      has gone back `retries` times, training stops with the last good weights.

    Both warn on every rank; `message` is the text of the last warning, or None.

    Args:
        monitor: one of the model's metrics, which must be a mean, or a key of a custom train_step's logs.
        action: "stop" or "go_back".
        window: number of steps whose losses are averaged; a shorter window at an epoch's end counts if it has at least
            half of them.
        rise: see above; None: a rise is never bad.
        ceiling: a loss that a successful training stays below, such as that of a model that ignores its input; None:
            no limit. Training goes back only to states after windows below it.
        grace: windows until the loss must be below the ceiling.
        directory: the one of a `Checkpoint` in this fit; training returns to its checkpoints. Default: copies in
            memory, twice the size of weights and optimizer state.
        factor: multiplies the learning rate every time training goes back.
        retries: how often training goes back before it stops.
    Raises: ConfigError: bad arguments (when created); with "go_back", a learning rate that is a schedule (at train
        begin; use `LearningRateSchedule` instead); no such key in the logs (after the first batch).
    Cost: 16 bytes all-reduced per window; with "go_back" a copy of weights and optimizer state per window.
    """

    def __init__(
        self,
        monitor: str = "loss",
        action: str = "stop",
        *,
        window: int = 50,
        rise: float | None = 2.0,
        directory: str | Path | None = None,
        factor: float = 0.5,
        retries: int = 3,
        ceiling: float | None = None,
        grace: int = 10,
    ) -> None:
        super().__init__()
        if action not in ("stop", "go_back"):
            raise ConfigError(f"action must be 'stop' or 'go_back'. Received: action={action!r}.")
        for name, value in (("window", window), ("retries", retries), ("grace", grace)):
            if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
                raise ConfigError(f"{name} must be a whole number, 1 or more. Received: {name}={value!r}.")
        if not positive("factor", factor) < 1:
            raise ConfigError(f"factor must be a number between 0 and 1. Received: factor={factor!r}.")
        if ceiling is not None and (not isinstance(ceiling, numbers.Real) or not math.isfinite(ceiling)):
            raise ConfigError(f"ceiling must be a finite number or None. Received: ceiling={ceiling!r}.")
        self.monitor, self.action, self.window, self.retries = monitor, action, window, retries
        self.ceiling, self.grace = ceiling, grace
        self.rise = None if rise is None else positive("rise", rise)
        self.directory, self.factor = directory, factor
        self.message: str | None = None
        self._good: InMemorySnapshots | SavedSnapshots | None = None
        self._in_epoch = self._must_reset = False

    # ---- for Keras ---------------------------------------------------------------------------------------------------

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self.message = None
        self._gone_back = self._batches = 0
        self._carried = np.zeros(2)
        self._judge = LossJudge(self.rise, self.ceiling, self.grace)
        self._good = None
        if self.action == "go_back":
            for optimizer in optimizers_with_rates(self.model):
                if learning_rate_variable(optimizer) is None:
                    raise ConfigError(
                        "DivergenceGuard(action='go_back') lowers the learning rate, which must be a number. Received: "
                        f"{type(optimizer).__name__} with a schedule. Compile with a number and give the schedule to "
                        "keras_ddl.callbacks.LearningRateSchedule."
                    )

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._in_epoch, self._must_reset, self._last_batch = True, False, -1
        self._taken = np.zeros(2)  # values of the tracker, which has just been reset
        if self.action == "go_back" and self._good is None:  # not at train begin: another callback may restore there
            if self.model.built:
                build_optimizer(self.model)
            self._good = SavedSnapshots(self.model, self.directory) if self.directory else InMemorySnapshots(self.model)

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self._must_reset:  # a running mean that is NaN would stay NaN
            self.model.reset_metrics()
            self._must_reset, self._taken = False, np.zeros(2)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._batches += batch - self._last_batch
        self._last_batch = batch
        if self._tracker() is None:
            if logs is None or self.monitor not in logs:
                raise ConfigError(
                    f"monitor must be a key of the logs. Received: monitor={self.monitor!r}; the logs have "
                    f"{sorted(logs or {})}."
                )
            self._carried += (float(logs[self.monitor]), 1.0)
        if self._batches >= self.window:
            self._judge_window()

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._end_epoch()  # before validation resets the metrics

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._end_epoch()

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _end_epoch(self) -> None:
        if self._in_epoch:
            self._in_epoch = False
            self._judge_window(at_end=True)

    def _tracker(self) -> Any:
        metrics = (m for m in self.model.metrics if m.name == self.monitor and isinstance(m, keras.metrics.Mean))
        return next(metrics, None)

    def _judge_window(self, at_end: bool = False) -> None:
        """Judges the window that ends here. COLLECTIVE."""
        tracker = self._tracker()
        if tracker is not None:
            now = np.array([float(tracker.total.numpy()), float(tracker.count.numpy())])
            self._carried, self._taken = self._carried + now - self._taken, now
        total, count = self._carried
        if communicator.is_initialized() and communicator.size() > 1:
            total, count = communicator.all_reduce_array(self._carried, op="sum", name="DivergenceGuard/loss")
        if count == 0:
            return
        loss = total / count
        if at_end and 2 * self._batches < self.window and math.isfinite(loss):
            return  # the first steps of the next epoch complete the window
        self._carried, self._batches = np.zeros(2), 0
        problem = self._judge.problem(loss)
        if problem is not None:
            self._act(loss, problem)
        elif self._good is not None and self._judge.is_good:
            self._good.confirm()

    def _act(self, loss: float, problem: str) -> None:
        step = step_of(self.model)
        finding = f"DivergenceGuard: {self.monitor} is {loss:g} in the window that ends with step {step}; {problem}."
        back = self._go_back(self._good) if self._good is not None else None
        self._must_reset = back is not None
        if back is None or self._gone_back == self.retries:
            why = "" if self._good is None else f" There is no {self._good.missing()}"
            if back is not None:
                why = f" Training has gone back {self.retries} times; the weights are those of step {back}."
            self._say(f"{finding} Training stops.{why} Lower the learning rate, clip gradients, or check the data.")
            stop_on_all_ranks(self.model)
            return
        self._gone_back += 1
        self._judge.go_back()
        lowered = [controller_of(each).lower(self.factor) for each in optimizers_with_rates(self.model)]
        rates = ", ".join(f"{rate:g}" for rate in lowered)
        self._say(
            f"{finding} Training goes back to step {back} and continues with learning rate {rates} "
            f"({self._gone_back} of {self.retries})."
        )

    def _go_back(self, good: InMemorySnapshots | SavedSnapshots) -> int | None:
        """Restores the last good state, except the learning rates, which others may have changed since."""
        optimizers = optimizers_with_rates(self.model)
        rates = [float(each.learning_rate.numpy()) for each in optimizers]
        back = good.go_back()
        for optimizer, rate in zip(optimizers, rates):
            before = float(optimizer.learning_rate.numpy())
            optimizer.learning_rate = rate
            if back is not None and before > 0:
                MomentumCorrection().scale(optimizer, rate / before)
        return back

    def _say(self, message: str) -> None:
        self.message = message
        stack_position.warn(message)


class LossJudge:
    """Decides from the losses of windows alone whether a training diverges, so all ranks agree.

    Args: as for DivergenceGuard.

    Attributes:
        is_good: whether the state after the last window may be kept. False if the window is bad, and if it is above
            the ceiling within the grace period.
    """

    def __init__(self, rise: float | None, ceiling: float | None, grace: int) -> None:
        self.rise, self.ceiling, self.grace = rise, ceiling, grace
        self.is_good = False
        self._windows = 0  # since the beginning, or since `go_back`
        self._first: float | None = None
        self._lowest: float | None = None
        self._before: tuple[float | None, float | None] = (None, None)  # `_lowest` at the last two good windows

    def problem(self, loss: float) -> str | None:
        """Returns the problem of this window, for a message, or None."""
        self._windows += 1
        under = self.ceiling is None or loss < self.ceiling
        problem = self._problem(loss, under)
        self.is_good = problem is None and under
        if problem is None:
            self._first = loss if self._first is None else self._first
            self._lowest = loss if self._lowest is None else min(loss, self._lowest)
        if self.is_good:
            self._before = (self._before[1], self._lowest)
        return problem

    def go_back(self) -> None:
        """Restores the judge's state from before the last good window, because training goes back there."""
        self._windows = 0
        self._lowest = self._first if self._before[0] is None else self._before[0]
        self._before = (self._before[0], self._before[0])

    def _problem(self, loss: float, under: bool) -> str | None:
        lowest = (
            "no earlier window was good" if self._lowest is None else f"the lowest earlier loss was {self._lowest:g}"
        )
        if not math.isfinite(loss):
            return lowest
        if loss > self._highest():
            return lowest
        if not under and self._windows >= self.grace:
            return f"it must be below {self.ceiling:g} by then"
        return None

    def _highest(self) -> float:
        if self.rise is None or self._lowest is None or self._first is None:
            return math.inf
        return self._lowest + self.rise * max(abs(self._lowest), _LEAST * abs(self._first))
