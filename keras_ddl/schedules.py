"""Learning rates for data-parallel training: how a rate grows with the number of ranks, and how it changes by step.

`scale_factor` and `scale_learning_rate` are the rules by size. The classes are ordinary
`keras.optimizers.schedules.LearningRateSchedule`s: give one to an optimizer as its learning rate. They need no
callback, are serialized with the model, and compute the same rate on every rank because they depend only on the
optimizer's step.

Sources: Goyal et al. 2017 (arXiv 1706.02677: linear scaling, gradual warm-up), Krizhevsky 2014 (arXiv 1404.5997:
square-root scaling), Vaswani et al. 2017 (arXiv 1706.03762: inverse-square-root decay), Luong, Brevdo and Zhao 2017
(the tutorial "Neural Machine Translation (seq2seq)" of TensorFlow: `luong_decay`). Cosine and polynomial decay are
Keras's own. `keras_ddl.callbacks.LearningRateSchedule` takes any of these objects, too, and then sets the rate by epoch
and batch.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any

import keras
from keras import ops
from keras.optimizers.schedules import LearningRateSchedule

from keras_ddl import communicator
from keras_ddl.errors import ConfigError

__all__ = [
    "InverseSquareRootDecay",
    "LinearWarmup",
    "Piecewise",
    "Staircase",
    "luong_decay",
    "scale_factor",
    "scale_learning_rate",
]


def __dir__() -> list[str]:
    return sorted(__all__)


Scaling = str | float | None


def scale_factor(scaling: Scaling = "linear", size: int | None = None) -> float:
    """Returns by how much the learning rate of one process grows when `size` ranks share one step.

    Args:
        scaling: "linear" (factor `size`; Goyal et al. 2017), "sqrt" (factor sqrt(size): keeps the variance of the
            step; Krizhevsky 2014), None (factor 1: the rate is right already, or the global batch has not grown), or
            a number > 0, the factor itself.
        size: number of ranks; default: this job's, or 1 before `keras_ddl.init()`.
    Raises: ConfigError: `scaling` is none of these, or `size` is not a whole number >= 1.
    """
    if size is None:
        size = communicator.size() if communicator.is_initialized() else 1
    if isinstance(size, bool) or not isinstance(size, numbers.Integral) or size < 1:
        raise ConfigError(f"size: the number of ranks must be a whole number, 1 or more. Received: size={size!r}.")
    if scaling is None:
        return 1.0
    if scaling == "linear":
        return float(size)
    if scaling == "sqrt":
        return math.sqrt(size)
    if isinstance(scaling, numbers.Real) and not isinstance(scaling, bool) and 0 < scaling < math.inf:
        return float(scaling)
    raise ConfigError(
        "scaling must be 'linear' (times size), 'sqrt' (times the square root of size), None (no scaling) or a "
        f"number > 0. Received: scaling={scaling!r}."
    )


def scale_learning_rate(learning_rate: float, scaling: Scaling = "linear", size: int | None = None) -> float:
    """Returns `learning_rate` (right for one process) times `scale_factor(scaling, size)`.

    Raises: ConfigError: as `scale_factor`, or `learning_rate` is not a finite number > 0.
    """
    return positive("learning_rate", learning_rate) * scale_factor(scaling, size)


def warmup_factor(progress: float, start: float, target: float) -> float:
    """Returns the point at `progress` of a line from `start` (progress 0) to `target` (progress 1 and later)."""
    return target if progress >= 1 else start + (target - start) * max(progress, 0.0)


@keras.saving.register_keras_serializable(package="keras_ddl")
class LinearWarmup(LearningRateSchedule):
    """Linear warm-up from one rate to another, then a constant rate or another schedule (Goyal et al. 2017).

        rate(step) = start + (target - start) * step / warmup_steps   for step < warmup_steps
        rate(step) = target, or after(step - warmup_steps)            from there on

    The first step (0) uses `start_learning_rate`, the first step after the warm-up uses `target_learning_rate`.

    Args:
        target_learning_rate: rate at the end of the warm-up, commonly
            `scale_learning_rate(rate_of_one_process, "linear")`.
        warmup_steps: length in optimizer steps; 0 for none.
        start_learning_rate: rate of the first step; default: target / (warmup_steps + 1), which is never 0.
        after: a LearningRateSchedule for the steps that follow (its step 0 is the first one after the warm-up).
    Raises: ConfigError: a rate is not a finite number > 0, or `warmup_steps` is not a whole number >= 0.
    """

    def __init__(
        self,
        target_learning_rate: float,
        warmup_steps: int,
        start_learning_rate: float | None = None,
        after: LearningRateSchedule | None = None,
    ) -> None:
        self.target_learning_rate = positive("target_learning_rate", target_learning_rate)
        self.warmup_steps = _steps("warmup_steps", warmup_steps, 0)
        if start_learning_rate is None:
            start_learning_rate = self.target_learning_rate / (self.warmup_steps + 1)
        self.start_learning_rate = positive("start_learning_rate", start_learning_rate)
        if after is not None and not isinstance(after, LearningRateSchedule):
            raise ConfigError(f"after must be a keras LearningRateSchedule or None. Received: after={after!r}.")
        self.after = after

    def __call__(self, step: Any) -> Any:
        dtype = keras.config.floatx()
        step = ops.cast(step, dtype)
        target = ops.cast(self.target_learning_rate, dtype)
        if self.after is not None:
            # The later schedule must not see negative steps, whose rate is not used but whose NaN would be.
            target = ops.cast(self.after(ops.maximum(step - self.warmup_steps, 0.0)), dtype)
        line = self.start_learning_rate + (self.target_learning_rate - self.start_learning_rate) * (
            step / max(self.warmup_steps, 1)
        )
        return ops.where(step < self.warmup_steps, line, target)

    def get_config(self) -> dict[str, Any]:
        return {
            "target_learning_rate": self.target_learning_rate,
            "warmup_steps": self.warmup_steps,
            "start_learning_rate": self.start_learning_rate,
            "after": _serialize(self.after),
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> LinearWarmup:
        return cls(**{**config, "after": _deserialize(config.get("after"))})


@keras.saving.register_keras_serializable(package="keras_ddl")
class InverseSquareRootDecay(LearningRateSchedule):
    """Linear warm-up to a peak, then decay with the inverse square root of the step (Vaswani et al. 2017).

        rate(step) = peak * min((step + 1) / warmup_steps, sqrt(warmup_steps / (step + 1)))

    The paper's d_model**-0.5 * min(s**-0.5, s * warmup**-1.5) is this formula with peak = (d_model *
    warmup_steps)**-0.5 and s = step + 1.

    Args:
        peak_learning_rate: the highest rate, reached at step `warmup_steps` - 1.
        warmup_steps: optimizer steps of warm-up, 1 or more; it is also the time scale of the decay.
    Raises: ConfigError: the rate is not a finite number > 0, or `warmup_steps` is not a whole number >= 1.
    """

    def __init__(self, peak_learning_rate: float, warmup_steps: int) -> None:
        self.peak_learning_rate = positive("peak_learning_rate", peak_learning_rate)
        self.warmup_steps = _steps("warmup_steps", warmup_steps, 1)

    def __call__(self, step: Any) -> Any:
        count = ops.cast(step, keras.config.floatx()) + 1.0
        return self.peak_learning_rate * ops.minimum(count / self.warmup_steps, ops.sqrt(self.warmup_steps / count))

    def get_config(self) -> dict[str, Any]:
        return {"peak_learning_rate": self.peak_learning_rate, "warmup_steps": self.warmup_steps}


@keras.saving.register_keras_serializable(package="keras_ddl")
class Staircase(LearningRateSchedule):
    """A constant rate that, after a given step, is multiplied by a factor every `every` steps.

        rate(step) = learning_rate                                                 for step < start_step
        rate(step) = learning_rate * factor ** floor((step - start_step) / every)  from there on

    Args:
        learning_rate: the rate until the first change.
        every: optimizer steps between two changes, 1 or more.
        factor: multiplies the rate at each change.
        start_step: the first change comes `every` steps after this step.
    Raises: ConfigError: a rate or factor is not a finite number > 0, or a step is not a whole number in its range.
    """

    def __init__(self, learning_rate: float, every: int, factor: float = 0.1, start_step: int = 0) -> None:
        self.learning_rate = positive("learning_rate", learning_rate)
        self.every = _steps("every", every, 1)
        self.factor = positive("factor", factor)
        self.start_step = _steps("start_step", start_step, 0)

    def __call__(self, step: Any) -> Any:
        dtype = keras.config.floatx()
        falls = ops.floor_divide(ops.maximum(ops.cast(step, "int64") - self.start_step, 0), self.every)
        return ops.cast(self.learning_rate, dtype) * ops.power(ops.cast(self.factor, dtype), ops.cast(falls, dtype))

    def get_config(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("learning_rate", "every", "factor", "start_step")}


_LUONG = {"luong5": (1, 2, 5), "luong10": (1, 2, 10), "luong234": (2, 3, 4)}  # share of steps before, number of falls


def luong_decay(learning_rate: float, total_steps: int, scheme: str = "luong10") -> Staircase:
    """Returns the decay of TensorFlow's NMT tutorial, which halves the rate several times late in the training.

    Args:
        total_steps: optimizer steps of the whole training.
        scheme: "luong10": ten halvings after half of the steps, "luong5": five after half, "luong234": four after two
            thirds; evenly spaced, the last one at the last step.
    Raises: ConfigError: another scheme, or fewer steps than halvings.
    """
    if scheme not in _LUONG:
        raise ConfigError(f"scheme must be one of {', '.join(map(repr, _LUONG))}. Received: scheme={scheme!r}.")
    numerator, denominator, falls = _LUONG[scheme]
    start = _steps("total_steps", total_steps, falls * denominator) * numerator // denominator
    return Staircase(learning_rate, (total_steps - start) // falls, 0.5, start)


@keras.saving.register_keras_serializable(package="keras_ddl")
class Piecewise(LearningRateSchedule):
    """One rate or schedule after another, joined at given steps.

    pieces[0] holds for step < boundaries[0], pieces[1] for boundaries[0] <= step < boundaries[1], and so on. A piece is
    a rate or a LearningRateSchedule, whose steps count from the beginning of the piece.

    Args:
        boundaries: increasing steps >= 1 at which the next piece begins.
        pieces: rates and schedules, one more than `boundaries`.
    Raises: ConfigError: the lengths do not fit, the boundaries do not increase, or a piece is neither of the two.
    """

    def __init__(self, boundaries: Sequence[int], pieces: Sequence[float | LearningRateSchedule]) -> None:
        self.boundaries = [_steps("boundaries", b, 1) for b in boundaries]
        if any(b >= c for b, c in zip(self.boundaries, self.boundaries[1:])):
            raise ConfigError(f"boundaries must increase. Received: boundaries={list(boundaries)!r}.")
        if len(pieces) != len(self.boundaries) + 1:
            raise ConfigError(
                f"There must be one more piece than boundaries ({len(self.boundaries)}). Received: {len(pieces)} "
                "pieces."
            )
        self.pieces = [p if isinstance(p, LearningRateSchedule) else positive("pieces", p) for p in pieces]

    def __call__(self, step: Any) -> Any:
        dtype = keras.config.floatx()
        step = ops.cast(step, dtype)
        rate = _rate(self.pieces[0], step, dtype)
        for begin, piece in zip(self.boundaries, self.pieces[1:]):
            rate = ops.where(step >= begin, _rate(piece, ops.maximum(step - begin, 0.0), dtype), rate)
        return rate

    def get_config(self) -> dict[str, Any]:
        return {"boundaries": list(self.boundaries), "pieces": [_serialize(p) for p in self.pieces]}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Piecewise:
        return cls(config["boundaries"], [_deserialize(p) for p in config["pieces"]])


def _rate(piece: float | LearningRateSchedule, step: Any, dtype: str) -> Any:
    return ops.cast(piece(step) if isinstance(piece, LearningRateSchedule) else piece, dtype)


def _serialize(piece: Any) -> Any:
    return keras.saving.serialize_keras_object(piece) if isinstance(piece, LearningRateSchedule) else piece


def _deserialize(piece: Any) -> Any:
    return keras.saving.deserialize_keras_object(piece) if isinstance(piece, dict) else piece


def positive(name: str, value: Any) -> float:
    """Returns `value` as a float; ConfigError, naming the argument `name`, unless it is a finite number > 0."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0 < float(value) < math.inf:
        raise ConfigError(f"{name} must be a finite number > 0. Received: {name}={value!r}.")
    return float(value)


def _steps(name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
        raise ConfigError(f"{name} must be a whole number of steps, {least} or more. Received: {name}={value!r}.")
    return int(value)
