"""Patches of Keras's losses and BatchNormalization: every rank's part of what the whole batch would have given.

Patched: keras/src/losses/loss.py, layers/normalization/batch_normalization.py (3.15.1).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keras_ddl import ops
from keras_ddl.compat import keras as keras_compat
from keras_ddl.compat.keras import keras
from keras_ddl.compat.tensorflow import tf
from keras_ddl.strategy import step
from keras_ddl.strategy.row_kinds import MEAN, SUM

_MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")


def scale_loss(original: Callable[..., Any]) -> Callable[..., Any]:
    """Scales a rank's mean by the rank's share of the rows, where Keras would by 1 / number of replicas.

    In a step of Keras there is one replica, and nothing to scale.
    """

    def scale_loss_for_distribution(value):
        strategy = keras_compat.replica_strategy()
        if strategy is None or step.current() is not None:
            return original(value)
        return _as_part(strategy.extended.share.scale(value))

    return scale_loss_for_distribution


def reduce_weighted_values(original: Callable[..., Any]) -> Callable[..., Any]:
    """Makes means exact whose denominator is not the number of rows, and losses that come as scalars.

    A mean over the valid positions of a mask, or one divided by the sum of the weights, is scaled by this rank's
    share of that denominator (one more all-reduce of 8 bytes). A loss function that returns a scalar is taken for a
    mean over the rows: Keras does not scale it at all, which multiplies its gradient by the number of ranks.
    """

    def patched(values, sample_weight=None, mask=None, reduction="sum_over_batch_size", dtype=None):
        arguments = {"sample_weight": sample_weight, "mask": mask, "reduction": reduction, "dtype": dtype}
        strategy = keras_compat.replica_strategy()
        running = step.current()
        if running is not None and reduction == "sum":
            running.values.warn_unread("a loss with reduction='sum'")
        if strategy is None or reduction not in _MEANS:
            return original(values, **arguments)
        if running is not None:
            return _of_own_rows(running, values, arguments, original)
        share = strategy.extended.share
        values = tf.convert_to_tensor(values, dtype=dtype)
        if values.shape.rank == 0:
            return _as_part(share.scale(original(values, **arguments)))
        if values.shape == (0,):  # Keras would return it unreduced
            return tf.reduce_sum(values)
        denominator = _denominator(values, sample_weight, mask, reduction)
        if denominator is None:
            return original(values, **arguments)
        with share.scaled_by(denominator):
            return original(values, **arguments)

    return patched


def _as_part(value: tf.Tensor) -> tf.Tensor:
    """Marks a scaled loss as this rank's part of a sum over ranks."""
    kinds = step.innermost().values.kinds
    if kinds is not None:
        kinds.mark(value, SUM)
    return value


def _of_own_rows(running: step.Step, values: Any, arguments: dict[str, Any], original: Callable[..., Any]) -> Any:
    """In a step of Keras: a value that is a mean over this rank's rows, as the graph's reader takes it for one."""
    values = tf.convert_to_tensor(values, dtype=arguments["dtype"])
    if values.shape.rank == 0:
        running.values.warn_unread("a loss function that returns one number for the batch")
        return original(values, **arguments)
    if values.shape == (0,):  # Keras would return it unreduced, and nothing would have a gradient
        return tf.reduce_sum(values)
    denominator = _denominator(values, arguments["sample_weight"], arguments["mask"], arguments["reduction"])
    loss = original(values, **arguments)
    if denominator is None:
        return loss
    share = running.share
    denominator = tf.stop_gradient(tf.cast(denominator, tf.float64))
    total = ops.all_reduce(denominator, op="sum", name="loss_denominator")
    factor = tf.stop_gradient(tf.math.divide_no_nan(denominator, total) * share.inverse())
    loss = tf.math.multiply_no_nan(loss, tf.cast(factor, loss.dtype))
    if running.values.kinds is not None:
        running.values.kinds.mark(loss, MEAN)
    return loss


def _denominator(values: tf.Tensor, sample_weight: Any, mask: Any, reduction: str) -> tf.Tensor | None:
    """What the mean over this rank's values is divided by, unless it is proportional to the rows."""
    if reduction != "mean_with_sample_weight":
        return None if mask is None else tf.reduce_sum(tf.cast(mask, values.dtype))
    weight = keras_compat.loss_module.apply_mask(
        None if sample_weight is None else tf.convert_to_tensor(sample_weight, dtype=values.dtype),
        None if mask is None else tf.convert_to_tensor(mask, dtype=values.dtype),
        dtype=values.dtype,
        reduction=reduction,
    )
    return None if weight is None else tf.reduce_sum(tf.cast(weight, values.dtype))


def moments(original: Callable[..., Any]) -> Callable[..., Any]:
    """BatchNormalization: `synchronized` also with a mask, and no NaN from a rank without rows.

    The mean of no rows is NaN, and averaged moving statistics would carry it to all ranks; such a rank keeps its
    moving statistics.
    """

    def _moments(self, inputs, mask):
        if keras_compat.replica_strategy() is None:
            return original(self, inputs, mask)
        if self.synchronized:
            return original(self, inputs, mask) if mask is None else _masked_moments(self, inputs, mask)
        mean, variance = original(self, inputs, mask)
        empty = tf.equal(tf.shape(inputs)[0], 0)
        moving_mean = tf.cast(self.moving_mean, mean.dtype)
        moving_variance = tf.cast(self.moving_variance, variance.dtype)
        return tf.where(empty, moving_mean, mean), tf.where(empty, moving_variance, variance)

    return _moments


def _masked_moments(layer: Any, inputs: tf.Tensor, mask: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """The masked moments of Keras, with its sums taken over all ranks."""
    context = tf.distribute.get_replica_context()
    axes = layer._reduction_axes
    valid = tf.broadcast_to(tf.cast(mask, tf.bool)[..., tf.newaxis], tf.shape(inputs))
    total = tf.reduce_sum(tf.where(valid, inputs, 0), axes, keepdims=True)
    count = tf.reduce_sum(tf.cast(valid, inputs.dtype), axes, keepdims=True)
    total, count = context.all_reduce(tf.distribute.ReduceOp.SUM, [total, count])
    divisor = count + keras.backend.epsilon()
    mean = total / divisor
    squares = tf.reduce_sum(tf.square(tf.where(valid, inputs - mean, 0)), axes, keepdims=True)
    variance = context.all_reduce(tf.distribute.ReduceOp.SUM, squares) / divisor
    return tf.squeeze(mean, axes), tf.squeeze(variance, axes)
