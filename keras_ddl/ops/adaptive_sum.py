"""The adaptive sum: gradients of several ranks combined by how far they point the same way."""

from __future__ import annotations

from typing import Any

from keras_ddl.communicator.group import Communicator
from keras_ddl.compat.tensorflow import tf
from keras_ddl.ops import raw
from keras_ddl.ops.arguments import dense_tensor

_DTYPES = (tf.float16, tf.bfloat16, tf.float32, tf.float64)


def adasum(tensor: Any, name: str | None, comm: Communicator) -> tf.Tensor:
    """Combines `tensor` over the ranks of `comm` by adaptive summation (Maleki et al., arXiv 2006.02924, 2020).

    Of two tensors a and b it is (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b: their sum where they are orthogonal, their
    mean where they are equal. Of more ranks it is a tree: neighbours are combined, 0 with 1, 2 with 3 and so on, then
    their results in the same way; one without a neighbour goes on as it is. So any number of ranks has one result.

    Args:
        tensor: shape [...], a float of 16, 32 or 64 bits. a.b and |a| are over all of its elements.
    Returns: shape [...]. float16 and bfloat16 are combined in float32, products are summed in float64. Bitwise equal on
        ranks whose hosts are alike: TensorFlow's sums depend on the number of its threads.
    Raises: ConfigError: another dtype, or IndexedSlices.
    """
    tensor = dense_tensor(tensor, "all_reduce by 'adasum'", _DTYPES)
    if comm.size == 1:
        return tf.identity(tensor)
    # Called what other all-reduces are called: ranks that reduce by another op meet it, and learn of it.
    gathered, _ = raw.all_gather(tensor[tf.newaxis], name, comm, kind="all_reduce", all_ranks=True)
    inside = tf.float64 if tensor.dtype == tf.float64 else tf.float32
    parts = [tf.cast(gathered[rank], inside) for rank in range(comm.size)]
    while len(parts) > 1:
        pairs = [_of_two(a, b) for a, b in zip(parts[::2], parts[1::2])]
        parts = pairs + parts[2 * len(pairs) :]
    return tf.ensure_shape(tf.cast(parts[0], tensor.dtype), tensor.shape)


def _of_two(a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    wide_a, wide_b = tf.cast(a, tf.float64), tf.cast(b, tf.float64)
    product = tf.reduce_sum(wide_a * wide_b)
    shares = [1 - tf.math.divide_no_nan(product, 2 * tf.reduce_sum(x * x)) for x in (wide_a, wide_b)]
    return tf.cast(shares[0], a.dtype) * a + tf.cast(shares[1], a.dtype) * b
