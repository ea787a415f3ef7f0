"""Sends rank 0's results to all ranks.

These are results of host functions, of operations that are not functions of their inputs, and of reads from objects
that each rank has separately.
"""

from __future__ import annotations

from collections.abc import Sequence

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.analysis.placements import REPLICATED, PlacedTensor
from keras_ddl.cut.analysis.program import Node, Value
from keras_ddl.cut.operations.context import Context
from keras_ddl.errors import ConfigError


def check_sendable(context: Context, node: Node, kind: str, remedy: str) -> None:
    """Raises ConfigError if a result of `node` cannot be sent from rank 0. `kind`: describes `node`."""
    other = next((each.dtype for each in node.outputs if not _travels(each.dtype)), None)
    if other is not None:
        raise ConfigError(
            f"{kind}, and rank 0 sends its results to the other ranks, so they must be numbers, booleans or strings. "
            f"Received: {other.name} of {node.type} (rank {context.collectives.rank}). {remedy}"
        )


def broadcast(context: Context, dtype: tf.DType, shape: tf.TensorShape, tensor: tf.Tensor | None) -> tf.Tensor:
    """Returns rank 0's tensor on every rank. COLLECTIVE. `tensor` is ignored on other ranks.

    The collective is a gather to which only rank 0 contributes entries.
    """
    assert context.everyone is not None
    is_first = context.everyone.rank == 0
    known = shape.as_list() if shape.is_fully_defined() else None
    if known is None:  # only rank 0 knows the shape
        mine = tf.shape(tensor) if is_first else tf.zeros([0], tf.int32)
        known = context.everyone.gather(mine, context.next_name("shape"))
    numeric = tf.uint8 if dtype == tf.bool else dtype
    entries = tf.cast(tf.reshape(tensor, [-1]), numeric) if is_first else tf.zeros([0], numeric)
    entries = context.everyone.gather(entries, context.next_name("from_rank_0"))
    result = tf.cast(tf.reshape(entries, known), dtype)
    result.set_shape(shape)
    return result


def broadcast_outputs(context: Context, node: Node, tensors: Sequence[tf.Tensor | None]) -> list[PlacedTensor]:
    """Returns rank 0's outputs of an operation on every rank; `tensors` of other ranks are ignored. COLLECTIVE."""
    pairs = zip(node.outputs, tensors)
    return [PlacedTensor(broadcast(context, value.dtype, value.shape, tensor), REPLICATED) for value, tensor in pairs]


def messages(values: list[Value]) -> int:
    """Returns how many collectives it takes to send these values."""
    return sum(1 if value.shape.is_fully_defined() else 2 for value in values)


def _travels(dtype: tf.DType) -> bool:
    return dtype.is_floating or dtype.is_integer or dtype.is_complex or dtype in (tf.bool, tf.string)
