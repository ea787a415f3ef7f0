"""Rules for operations along an axis that is itself cut: softmax, cross entropies of a cut vocabulary, largest entries.

Instead of gathering entries, a few numbers per row are combined over ranks: the largest entry, and sums.
"""

from __future__ import annotations

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.analysis.dims import ONE
from keras_ddl.cut.analysis.placements import REPLICATED, PlacedOutputs, Sharded
from keras_ddl.cut.analysis.program import Node, Value
from keras_ddl.cut.operations.context import Context
from keras_ddl.cut.operations.factors import HALF
from keras_ddl.cut.operations.propagation import propagate
from keras_ddl.cut.operations.registry import rule
from keras_ddl.cut.rules.tables import own_rows
from keras_ddl.cut.values.collectives import COMBINED_DTYPES


@rule("Softmax", "LogSoftmax")
def softmax(b: Context, node: Node) -> PlacedOutputs | None:
    """Builds a softmax along a cut axis; the result is cut along the same axis."""
    value = node.inputs[0]
    placement = _cut(b, value, len(b.dims(value)) - 1)
    if placement is None:
        return propagate(b, node)
    shifted, exps = _shifted_exponentials(b, node, _wide(b.local(value)))
    total = b.sum_over_ranks(node, lambda: tf.reduce_sum(exps, -1, keepdims=True))
    result = exps / total if node.type == "Softmax" else shifted - tf.math.log(total)
    return [(tf.cast(result, value.dtype), placement)]


@rule("SoftmaxCrossEntropyWithLogits")
def cross_entropy(b: Context, node: Node) -> PlacedOutputs | None:
    """Builds the cross entropy of logits or labels that are cut along the classes. Each rank sums over its classes."""
    others = {b.placement(each) for each in node.inputs if b.placement(each) != REPLICATED}
    known = [b.dims(each) for each in node.inputs]
    cut = next((placement for each in node.inputs if (placement := _cut(b, each, 1)) is not None), None)
    if cut is None or len(others) != 1:
        return propagate(b, node)
    if not all(b.can_shard(each, cut) or dims[1] == ONE for each, dims in zip(node.inputs, known)):
        return None
    logits, labels = (
        _wide(b.redistributed(each, cut) if b.can_shard(each, cut) else b.replicated(each)) for each in node.inputs
    )
    logits, labels = logits + tf.zeros_like(labels), labels + tf.zeros_like(logits)  # broadcast against each other
    shifted, exps = _shifted_exponentials(b, node, logits)
    sums = b.combined_over_ranks(
        node,
        {
            "exps": lambda: tf.reduce_sum(exps, 1),
            "labels": lambda: tf.reduce_sum(labels, 1),
            "products": lambda: tf.reduce_sum(labels * shifted, 1),
        },
    )
    loss = tf.math.log(sums["exps"]) * sums["labels"] - sums["products"]
    backprop = exps / sums["exps"][:, tf.newaxis] - labels
    dtype = node.outputs[0].dtype
    return [(tf.cast(loss, dtype), REPLICATED), (tf.cast(backprop, dtype), cut)]


@rule("SparseSoftmaxCrossEntropyWithLogits")
def sparse_cross_entropy(b: Context, node: Node) -> PlacedOutputs | None:
    """Builds the sparse cross entropy of logits that the model axis cuts along a vocabulary."""
    logits, labels = node.inputs
    placement = _cut(b, logits, 1)
    if b.rows_by_extent or placement is None:
        return propagate(b, node)
    if placement.blocks != ONE:
        return None
    at = b.replicated(labels)
    shifted, exps = _shifted_exponentials(b, node, _wide(b.local(logits)))
    mine, place = own_rows(b, placement, at)

    def shifted_at_label() -> tf.Tensor:
        return tf.where(mine, tf.gather(shifted, place, axis=1, batch_dims=1), tf.zeros([], shifted.dtype))

    sums = b.combined_over_ranks(node, {"exps": lambda: tf.reduce_sum(exps, 1), "label": shifted_at_label})
    outside = tf.constant(-1, place.dtype)
    hot = tf.one_hot(tf.where(mine, place, outside), shifted.shape[1], dtype=shifted.dtype)
    loss = tf.math.log(sums["exps"]) - sums["label"]
    backprop = exps / sums["exps"][:, tf.newaxis] - hot
    dtype = logits.dtype
    return [(tf.cast(loss, dtype), REPLICATED), (tf.cast(backprop, dtype), placement)]


@rule("ArgMax", "ArgMin")
def place_of_largest(b: Context, node: Node) -> PlacedOutputs | None:
    """Finds the first place of the largest (or smallest) entry along an axis that the model axis cuts."""
    value, axis = node.inputs
    along = b.extents.constants(axis)[0] % len(b.dims(value))
    placement, combined = _cut(b, value, along), {value.dtype, node.outputs[0].dtype}
    if b.rows_by_extent or placement is None or not combined <= COMBINED_DTYPES - {tf.bool}:
        return propagate(b, node)
    if placement.blocks != ONE:
        return None
    own, dtype = b.local(value), node.outputs[0].dtype
    is_max = node.type == "ArgMax"
    # TensorFlow starts from the lowest number; NaN is not greater, so it never counts as the largest entry.
    bound = tf.constant(value.dtype.min if is_max else value.dtype.max, value.dtype)
    beyond = tf.where(own > bound if is_max else own < bound, own, bound)
    best = tf.reduce_max(beyond, along) if is_max else tf.reduce_min(beyond, along)
    op = "max" if is_max else "min"
    best_of_all = b.combined_over_ranks(node, {"best": lambda: best}, op)["best"]
    first = b.scalar(b.times(b.batch.offset, b.local_extent(placement)), dtype)

    def place() -> tf.Tensor:
        return tf.where(
            best == best_of_all, first + b.make(node, [own, b.replicated(axis)])[0], tf.constant(dtype.max, dtype)
        )

    return [(b.combined_over_ranks(node, {"place": place}, "min")["place"], REPLICATED)]


def _cut(b: Context, value: Value, axis: int) -> Sharded | None:
    """Returns the placement of a value that is sharded along this axis and not also available replicated."""
    placement = b.placement(value)
    if isinstance(placement, Sharded) and placement.axis == axis and not b.has_replicated(value):
        return placement
    return None


def _wide(tensor: tf.Tensor) -> tf.Tensor:
    """Returns 16-bit floats as float32, so that partial sums are not rounded."""
    return tf.cast(tensor, tf.float32) if tensor.dtype in HALF else tensor


def _shifted_exponentials(b: Context, node: Node, own: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns entries minus the largest entry of all ranks along the last axis, and their exponentials."""
    top = b.combined_over_ranks(node, {"top": lambda: tf.reduce_max(own, -1, keepdims=True)}, "max")["top"]
    shifted = own - top
    return shifted, tf.exp(shifted)
