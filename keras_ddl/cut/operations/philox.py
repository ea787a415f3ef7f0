"""Draws a stretch of random numbers from the middle of a longer draw, without drawing the numbers before it.

Philox (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) makes group n of a draw from the key and
the counter plus n alone. TensorFlow's uniform and normal draws take their numbers group by group, on CPU and GPU.
Truncated normal draws reject some, so TensorFlow reserves many values of the counter for each group.
"""

from __future__ import annotations

from collections.abc import Callable

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.values.local_shapes import Scalar, Vector

ALGORITHM = 1
ALGORITHMS = (ALGORITHM, 3)  # 3 leaves the choice to the device: Philox on CPU and GPU
_BITS_PER_COUNTER = 128  # bits from one value of the counter; a number takes 32 of them, or 64
_RESERVED = 256  # 32-bit samples for each number of a truncated draw (kReservedSamplesPerOutput, random_op_cpu.h)


def numbers_per_group(dtype: tf.DType) -> int:
    """Returns how many numbers of a dtype one value of the counter gives."""
    return _BITS_PER_COUNTER // (64 if dtype.size == 8 else 32)


def counters_per_truncated_group(dtype: tf.DType) -> int:
    """Returns by how much the counter grows from one group of a truncated normal draw to the next."""
    return numbers_per_group(dtype) * _RESERVED * 32 // _BITS_PER_COUNTER


def stretch(
    draw: Callable[[tf.Tensor, Vector], tf.Tensor],
    counter: tf.Tensor,
    skipped: Scalar,
    shape: Vector,
    dtype: tf.DType,
    *,
    in_groups: bool,
    counters_of_a_group: int = 1,
) -> tf.Tensor:
    """Returns the numbers of a draw that follow its first `skipped`, in `shape`.

    Args:
        draw: returns random numbers, given a counter and a shape.
        counter: the counter of the whole draw, two uint64, the low one first.
        skipped: how many numbers of the draw to leave out, an int or an int64 scalar.
        shape: the shape of the result, ints or an int64 vector.
        dtype: the dtype of the numbers.
        in_groups: whether `skipped` is certainly a multiple of `numbers_per_group(dtype)`.
        counters_of_a_group: the counter's increment from group to group.
    Cost: drawing the numbers of the result, and at most three more.
    """
    group = numbers_per_group(dtype)
    with tf.device("CPU:0"):
        moved = _forward(counter, skipped // group * counters_of_a_group)
    if in_groups:
        return draw(moved, shape)
    with tf.device("CPU:0"):
        over = skipped % group
        count = tf.reduce_prod(tf.cast(shape, tf.int64))
    return tf.reshape(draw(moved, [over + count])[over:], shape)


def _forward(counter: tf.Tensor, groups: Scalar) -> tf.Tensor:
    low = counter[0] + tf.cast(groups, tf.uint64)
    carry = tf.cast(low < counter[0], tf.uint64)
    return tf.stack([low, counter[1] + carry])
