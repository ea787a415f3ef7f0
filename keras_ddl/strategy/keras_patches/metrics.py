"""Patches of Keras's metrics: in a step of Keras, a number that has no rows counts by the rank's share of them.

`loss_tracker.update_state(loss)` counts 1 for each batch in one process. The states of all ranks are added up, so each
rank counts its share of 1. Values that have rows need nothing: they are counted row by row.

Patched: keras/src/metrics/reduction_metrics.py (3.15.1).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keras_ddl.compat import tensorflow as tf_compat
from keras_ddl.compat.tensorflow import tf
from keras_ddl.strategy import step
from keras_ddl.strategy.row_kinds import COUNT, INDEPENDENT


def mean_update_state(original: Callable[..., Any]) -> Callable[..., Any]:
    """Mean: this rank's part of the value and of the count."""

    def update_state(self, values, sample_weight=None):
        found = _scalar(self, values, sample_weight)
        if found is None:
            return original(self, values, sample_weight)
        share, part, weight = found
        self.total.assign_add(tf.reduce_sum(part) * weight)
        self.count.assign_add(tf.cast(share, weight.dtype) * tf.cast(tf.size(part), weight.dtype) * weight)
        return None

    return update_state


def sum_update_state(original: Callable[..., Any]) -> Callable[..., Any]:
    """Sum: this rank's part of the value."""

    def update_state(self, values, sample_weight=None):
        found = _scalar(self, values, sample_weight)
        if found is None:
            return original(self, values, sample_weight)
        _, part, weight = found
        self.total.assign_add(tf.reduce_sum(part) * weight)
        return None

    return update_state


def _scalar(metric: Any, values: Any, sample_weight: Any) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor] | None:
    """Returns (share of the rows, part of the value, weight of one process) for a number, or several that are no rows
    (a mean for each class); None for what has rows.
    """
    running = step.current()
    if running is None or running.share.size == 1:
        return None
    value = tf.convert_to_tensor(values)
    weight = tf.ones([], metric.dtype) if sample_weight is None else tf.convert_to_tensor(sample_weight)
    if weight.shape.rank != 0 or (value.shape.rank != 0 and _has_rows(running, value)):
        return None
    if sample_weight is not None:
        weight = _global_weight(running, weight)
    if value.dtype.is_floating:
        part = tf.cast(running.values.part(value), metric.dtype)
    else:
        part = running.values.part(tf.cast(value, metric.dtype))
    return running.share.share(), part, tf.cast(weight, metric.dtype)


def _has_rows(running: step.Step, value: tf.Tensor) -> bool:
    kinds = running.values.kinds
    return kinds is None or value.shape.rank is None or kinds.of(value).name in ("rows", "opaque")


def _global_weight(running: step.Step, weight: tf.Tensor) -> tf.Tensor:
    """Returns the weight that one process would have given: where it is the number of rows, that of all ranks."""
    kinds = running.values.kinds
    if kinds is None:
        return running.share.total() if weight.dtype.is_integer else weight
    kind = kinds.of(weight)
    if kind == INDEPENDENT:
        constant = tf_compat.constant_value(weight)
        is_rows = kinds.static_rows is not None and constant is not None and constant == kinds.static_rows
        return running.share.total() if is_rows else weight
    if kind == COUNT:
        return tf.cast(weight, tf.float64) * running.share.inverse()  # needs no communication
    return running.values.everyone(tf.cast(weight, tf.float64))
