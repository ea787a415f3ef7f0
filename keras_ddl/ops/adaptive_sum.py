"""The arguments and the gradient of the adaptive sum (Adasum), which combines gradients by their directions.

The sum itself is in native/core/src/hierarchy/adaptive_sum.cc.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from keras_ddl.communicator.group import Communicator
from keras_ddl.compat.tensorflow import tf
from keras_ddl.ops import names, raw
from keras_ddl.ops.arguments import dense_tensor

DTYPES = (tf.float16, tf.bfloat16, tf.float32, tf.float64)


def floats(tensor: Any, function: str) -> tf.Tensor:
    """Returns `tensor` as a dense tensor. Raises: ConfigError: it is sparse, or its dtype is not a float."""
    return dense_tensor(tensor, f"{function} by 'adasum'", DTYPES)


def gradients(
    inputs: Sequence[tf.Tensor], upstream: Sequence[tf.Tensor], name: str, comm: Communicator
) -> list[tf.Tensor]:
    """Returns the gradient for each of `inputs`, from the `upstream` gradients of their adaptive sums.

    Differentiates `definition` on the tensors of all ranks. Cost: an all_reduce of `upstream`, and for each input
    size * nbytes of traffic and memory on every rank.
    """
    totals = raw.all_reduce_n(upstream, "sum", name, comm)
    results = []
    for place, (x, total) in enumerate(zip(inputs, totals)):
        parts, _ = raw.all_gather(x[tf.newaxis], names.derived(name, f"parts_{place}"), comm, all_ranks=True)
        with tf.GradientTape() as tape:
            tape.watch(parts)
            combined = definition([parts[rank] for rank in range(comm.size)])
        results.append(tf.ensure_shape(tape.gradient(combined, parts, total)[comm.rank], x.shape))
    return results


def definition(parts: list[tf.Tensor]) -> tf.Tensor:
    """Returns the adaptive sum of tensors of one shape, as the core computes it over the ranks.

    For two tensors a and b it is (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b: their sum if they are orthogonal, their
    mean if they are equal. More tensors form a tree: neighbours are combined, 0 with 1, 2 with 3 and so on, then their
    results in the same way; a tensor without a neighbour passes to the next level.
    """
    dtype = parts[0].dtype
    parts = [tf.cast(part, tf.float64 if dtype == tf.float64 else tf.float32) for part in parts]
    while len(parts) > 1:
        pairs = [_sum_of_two(a, b) for a, b in zip(parts[::2], parts[1::2])]
        parts = pairs + parts[2 * len(pairs) :]
    return tf.cast(parts[0], dtype)


def _sum_of_two(a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    wide_a, wide_b = tf.cast(a, tf.float64), tf.cast(b, tf.float64)
    product = tf.reduce_sum(wide_a * wide_b)
    shares = [1 - tf.math.divide_no_nan(product, 2 * tf.reduce_sum(x * x)) for x in (wide_a, wide_b)]
    return tf.cast(shares[0], a.dtype) * a + tf.cast(shares[1], a.dtype) * b
