"""Keras callbacks for what only the user can decide (docs/callbacks.md). They compose with Keras's own, in any order.

All of them work at size 1, and without a Strategy after `keras_ddl.init()`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from keras_ddl import parts
from keras_ddl.callbacks.average_logs import AverageLogs
from keras_ddl.callbacks.broadcast_variables import BroadcastVariables
from keras_ddl.callbacks.checkpoint import Checkpoint
from keras_ddl.callbacks.divergence_guard import DivergenceGuard
from keras_ddl.callbacks.learning_rate_schedule import LearningRateSchedule
from keras_ddl.callbacks.learning_rate_warmup import LearningRateWarmup

if TYPE_CHECKING:
    from keras_ddl.export.checkpoints.callbacks import ExportBase as ExportBase
    from keras_ddl.export.checkpoints.callbacks import Publish as Publish
    from keras_ddl.timeline.step_metrics import StepMetrics as StepMetrics

__all__ = [
    "AverageLogs",
    "BroadcastVariables",
    "Checkpoint",
    "DivergenceGuard",
    "LearningRateSchedule",
    "LearningRateWarmup",
]


def __dir__() -> list[str]:
    provided = [what for part in parts.installed() for what in part.provides if what.startswith("callbacks.")]
    return sorted([*__all__, *(what.removeprefix("callbacks.") for what in provided)])


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        for value in parts.provided(f"callbacks.{name}"):
            globals()[name] = value
            return value
        missing = parts.is_missing(f"callbacks.{name}")
        raise AttributeError(
            parts.why_missing(f"callbacks.{name}") if missing else f"module {__name__!r} has no attribute {name!r}"
        )
