"""The patch of keras.Variable that keeps the state of metrics of the program's own such that it combines over ranks.

What a metric does with its state tells how: what it adds to it is added up over ranks (a mean or a number that has no
rows by the rank's part of it), a maximum's maximum is taken, and any other value is made that of one process when it is
assigned, if it is a function of totals over rows. Otherwise the reduction is asked for.

Patched: keras/src/backend/tensorflow/core.py (3.15.1).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keras_ddl.compat import keras as keras_compat
from keras_ddl.compat import tensorflow as tf_compat
from keras_ddl.compat.tensorflow import tf
from keras_ddl.errors import ConfigError
from keras_ddl.strategy import metric_state, step
from keras_ddl.strategy.row_kinds import INDEPENDENT

_PASSES_ON = ("Identity", "Cast", "Snapshot")
_READS = ("ReadVariableOp",)


def direct_assign(original: Callable[..., Any]) -> Callable[..., Any]:
    """Assigns a value to a variable; to the state of a metric of the program's own, this rank's part of it."""

    def _direct_assign(self, value):
        running = step.current()
        if running is None or running.values.kinds is None or running.share.size == 1:
            return original(self, value)
        metric = metric_state.own_metrics(running.model).get(id(self))
        if metric is None or metric_state.is_declared(metric, self):
            return original(self, value)
        return original(self, _of_all_ranks(running, metric, self, tf.convert_to_tensor(value)))

    return _direct_assign


def _of_all_ranks(running: step.Step, metric: Any, variable: Any, value: tf.Tensor) -> tf.Tensor:
    expression = _strip(value)
    operands = [_strip(each) for each in expression.op.inputs if each.dtype != tf.resource]
    reads = [_reads(each, variable) for each in operands]
    kind = expression.op.type
    if kind in ("AddV2", "Add", "Sub") and reads.count(True) == 1 and (kind != "Sub" or reads[0]):
        metric_state.set_reduction(metric, variable, "sum")
        change = _part(running, operands[reads.index(False)], variable)
        state = tf.cast(operands[reads.index(True)], value.dtype)
        return state - change if kind == "Sub" else state + change
    if kind in ("TensorScatterAdd", "TensorScatterSub") and reads[0]:
        metric_state.set_reduction(metric, variable, "sum")
        return value
    if kind in ("Maximum", "Minimum") and any(reads):
        metric_state.set_reduction(metric, variable, "max" if kind == "Maximum" else "min")
        return value
    found = running.values.kind(value)
    if found == INDEPENDENT:
        return value  # equal on all ranks, or the rank's own state, kept
    metric_state.set_reduction(metric, variable, "equal")
    name = keras_compat.plain_name(variable.name)
    if found.mixed or found.name in ("opaque", "rows") or not value.dtype.is_floating:
        raise ConfigError(
            "The state of a metric must combine over ranks: sums, maxima and minima over what it held before, or "
            "functions of means and sums over the rows of the batch. "
            f"Received: metric {metric.name!r} ({type(metric).__name__}) sets {name!r} in "
            f"another way, an operation {kind!r} (rank {running.share.rank}). Say how the ranks' values combine with "
            "add_variable(..., aggregation='mean' or 'only_first_replica'), or with an attribute of the metric: "
            f"ddl_reduction = {{{name!r}: 'sum', 'mean', 'max' or 'min'}}."
        )
    return running.values.everyone(value)


def _part(running: step.Step, change: tf.Tensor, variable: Any) -> tf.Tensor:
    """Returns this rank's part of what a metric adds to its state."""
    kinds = running.values.kinds
    kind = kinds.of(change)
    dtype = tf.as_dtype(variable.dtype)
    if kind == INDEPENDENT:
        constant = tf_compat.constant_value(change)
        if kinds.static_rows is not None and constant is not None and (constant == kinds.static_rows).all():
            return tf.cast(change, dtype)  # the number of rows
        return tf.cast(change if running.share.rank == 0 else tf.zeros_like(change), dtype)
    if change.dtype.is_floating and (kind.is_mean or kind.name == "function") and not kind.mixed:
        return tf.cast(running.values.part(change), dtype)
    return tf.cast(change, dtype)


def _strip(tensor: tf.Tensor) -> tf.Tensor:
    while tensor.op.type in _PASSES_ON:
        tensor = tensor.op.inputs[0]
    return tensor


def _reads(tensor: tf.Tensor, variable: Any) -> bool:
    if tensor.op.type not in _READS:
        return False
    handle = tensor.op.inputs[0]
    while handle.op.type == "Placeholder":
        outside = tf_compat.captured_from(handle)
        if outside is None:
            return False
        if tf_compat.is_eager(outside):
            return outside is variable.value.handle
        handle = outside
    return handle is variable.value.handle
