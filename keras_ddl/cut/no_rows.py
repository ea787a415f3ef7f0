"""For operations that do not work on nothing: a rank without rows gives them one row of zeros."""

from __future__ import annotations

from typing import Any

from keras_ddl.compat.tensorflow import tf


def at_least_one(b: Any, tensor: tf.Tensor, axis: int) -> tf.Tensor:
    """Returns `tensor`, with an entry of zeros along `axis`, the axis of the cut, if this rank has no rows."""
    mine = b.batch.mine
    if isinstance(mine, int):
        missing: Any = int(mine == 0)
        if not missing:
            return tensor
    else:
        missing = tf.cast(mine < 1, tf.int64)
    paddings = [[0, missing if each == axis else 0] for each in range(tensor.shape.rank)]
    return tf.pad(tensor, paddings)


def without_it(b: Any, tensor: tf.Tensor, axis: int) -> tf.Tensor:
    """Returns what an operation made of `at_least_one` without the entry that was put in."""
    mine = b.batch.mine
    if isinstance(mine, int) and mine:
        return tensor
    extent = tf.shape(tensor, out_type=tf.int64)[axis]
    kept = extent * tf.cast(mine > 0, tf.int64)
    size = [kept if each == axis else -1 for each in range(tensor.shape.rank)]
    return tf.slice(tensor, b.as_vector([0] * tensor.shape.rank, tf.int64), b.as_vector(size))
