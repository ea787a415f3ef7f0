"""The oracle of `batch_statistics="rank"`: normalises each rank's rows separately, in plain TensorFlow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras

from keras_ddl.compat.tensorflow import tf

MOMENTUM = 0.9


class Chunks(keras.layers.Layer):
    """Batch normalisation with separate statistics for each rank's rows.

    Args:
        split: returns the numbers of rows by rank, given the rows of the batch.
        batches: number of batches that are concatenated in the input.
    """

    def __init__(
        self, split: Callable[[int], Sequence[int]], *, axis: int = -1, epsilon: float = 1e-3, batches: int = 1
    ) -> None:
        super().__init__()
        self.split, self.axis, self.own_epsilon, self.batches = split, axis, epsilon, batches

    def build(self, shape: Any) -> None:
        def weight(first: str, trainable: bool) -> Any:
            return self.add_weight(shape=(shape[self.axis],), initializer=first, trainable=trainable, autocast=False)

        self.gamma, self.beta = weight("ones", True), weight("zeros", True)
        self.moving_mean, self.moving_variance = weight("zeros", False), weight("ones", False)

    def compute_output_shape(self, shape: Any) -> Any:
        return shape

    def call(self, x: Any, training: bool = False) -> Any:
        given, x = x, tf.cast(x, "float64" if x.dtype == tf.float64 else "float32")
        rank, rows = x.shape.rank, x.shape[0]
        axes = [axis for axis in range(rank) if axis != self.axis % rank]
        channels = [1 if axis in axes else -1 for axis in range(rank)]
        counts = [each for each in self.split(rows // self.batches) if each]
        # [batch][rank], then [rank][batch]
        pieces = list(zip(*(tf.split(each, counts) for each in tf.split(x, self.batches))))
        found, means, variances = [], 0.0, 0.0
        for own in pieces:
            part = tf.concat(own, 0)
            mean = tf.reduce_mean(part, axes, keepdims=True)
            variance = tf.reduce_mean(tf.square(part - mean), axes, keepdims=True)
            found.append(tf.split((part - mean) / tf.sqrt(variance + self.own_epsilon), self.batches))
            share = part.shape[0] / rows
            means, variances = means + share * tf.reshape(mean, [-1]), variances + share * tf.reshape(variance, [-1])
        for kept, new in ((self.moving_mean, means), (self.moving_variance, variances)):
            kept.assign(tf.cast(kept, x.dtype) * MOMENTUM + new * (1 - MOMENTUM))
        gamma, beta = (tf.reshape(tf.cast(each, x.dtype), channels) for each in (self.gamma, self.beta))
        in_order = tf.concat([part for batch in zip(*found) for part in batch], 0)
        return tf.cast(in_order * gamma + beta, given.dtype)
