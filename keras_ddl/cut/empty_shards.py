"""Operations whose kernels fail on an empty tensor: a rank without rows gives them one row of zeros."""

from __future__ import annotations

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.context import Context
from keras_ddl.cut.placements import Sharded


def pad(b: Context, tensor: tf.Tensor, placement: Sharded) -> tf.Tensor:
    """Returns a shard, with an entry of zeros along the sharded axis if this rank has no rows."""
    rows, axis = b.local_rows(placement), placement.axis
    if isinstance(rows, int) and rows:
        return tensor
    missing = 1 if isinstance(rows, int) else tf.cast(rows < 1, tf.int64)
    paddings = [[0, missing if each == axis else 0] for each in range(tensor.shape.rank)]
    return tf.pad(tensor, paddings)


def trim(b: Context, tensor: tf.Tensor, placement: Sharded) -> tf.Tensor:
    """Returns the result of an operation on padded shards without the entry of the padding."""
    rows, axis = b.local_rows(placement), placement.axis
    if isinstance(rows, int) and rows:
        return tensor
    extent = tf.shape(tensor, out_type=tf.int64)[axis]
    kept = extent * tf.cast(rows > 0, tf.int64)
    size = [kept if each == axis else -1 for each in range(tensor.shape.rank)]
    return tf.slice(tensor, b.vector([0] * tensor.shape.rank, tf.int64), b.vector(size))
