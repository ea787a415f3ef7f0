"""SyncBatchNormalization: batch normalization over all ranks' batches, without a Strategy."""

from __future__ import annotations

from typing import Any

from keras_ddl import communicator, ops
from keras_ddl.compat.keras import keras
from keras_ddl.compat.models import reduction_axes
from keras_ddl.compat.tensorflow import do_not_convert, tf
from keras_ddl.errors import ConfigError


@keras.saving.register_keras_serializable("keras_ddl")
class SyncBatchNormalization(keras.layers.BatchNormalization):
    """keras.layers.BatchNormalization with the statistics of all ranks' rows.

    Training gives the results of one process with all rows of the step, including gradients and moving statistics.
    Ranks may have different numbers of rows.

    Args:
        fused: must be False, as in Horovod.
        kwargs: arguments of keras.layers.BatchNormalization.
    Raises: ConfigError: fused=True.
    Cost: one all-gather of two numbers per channel and rank; its gradient costs one all-reduce of the same size.
    """

    def __init__(self, fused: bool = False, **kwargs: Any) -> None:
        if fused or fused is None:
            raise ConfigError(f"SyncBatchNormalization cannot be fused. Received: fused={fused!r}. Leave it out.")
        super().__init__(**kwargs)

    @do_not_convert
    def _moments(self, inputs: tf.Tensor, mask: tf.Tensor | None) -> tuple[tf.Tensor, tf.Tensor]:
        """Combines the ranks' means and squared deviations (Chan, Golub and LeVeque, 1983).

        The mean of squares minus the squared mean would suffer from cancellation.
        """
        if communicator.size() == 1:
            return super()._moments(inputs, mask)
        axes = reduction_axes(self)
        if mask is None:
            valid = tf.ones_like(inputs)
            slack = 0.0
        else:
            valid = tf.broadcast_to(tf.cast(mask, inputs.dtype)[..., tf.newaxis], tf.shape(inputs))
            slack = keras.backend.epsilon()  # as in Keras with a mask
        rows = tf.reduce_sum(valid, axes)
        mean = tf.math.divide_no_nan(tf.reduce_sum(inputs * valid, axes), rows)
        shape = [1] * inputs.shape.rank
        shape[self.axis] = -1
        squares = tf.reduce_sum(tf.square(inputs - tf.reshape(mean, shape)) * valid, axes)
        # [ranks, 3, channels]
        stats = ops.all_gather(tf.stack([rows, mean, squares])[tf.newaxis])
        rows, means, squares = tf.unstack(stats, axis=1)
        total = tf.reduce_sum(rows, 0) + slack
        mean = tf.math.divide_no_nan(tf.reduce_sum(means * rows, 0), total)
        squares = tf.reduce_sum(squares + rows * tf.square(means - mean), 0)
        return mean, tf.math.divide_no_nan(squares, total)
