"""Operations along the last axis, with independent rows: softmax, cross entropies, the best k."""

from __future__ import annotations

from keras_ddl.cut.analysis.dims import if_certain
from keras_ddl.cut.analysis.extents import Extents
from keras_ddl.cut.analysis.program import Node
from keras_ddl.cut.operations.factors import NEW, Factors, broadcast_labels, labels_of, spec


@spec("Softmax", "LogSoftmax")
def _softmax(known: Extents, node: Node) -> Factors:
    labels = labels_of(known.dims(node.inputs[0]), [-1])
    return Factors([labels], [labels])


@spec("SparseSoftmaxCrossEntropyWithLogits")
def _sparse_cross_entropy(known: Extents, node: Node) -> Factors:
    return Factors(["rC", "r"], ["r", "rC"])


@spec("SoftmaxCrossEntropyWithLogits")
def _cross_entropy(known: Extents, node: Node) -> Factors:
    """Logits and labels are broadcast against each other."""
    operands, result = broadcast_labels([known.dims(each) for each in node.inputs])
    result = result.replace("b", "B")
    return Factors([each.replace("b", "B") for each in operands], [result[:1], result])


@spec("InTopK", "InTopKV2")
def _in_top_k(known: Extents, node: Node) -> Factors:
    return Factors(["rC", "r", None][: len(node.inputs)], ["r"])


@spec("TopKV2")
def _top_k(known: Extents, node: Node) -> Factors:
    labels = labels_of(known.dims(node.inputs[0]), [-1])
    count = if_certain(known.number, node.inputs[1])
    result = labels[:-1] + NEW
    return Factors([labels, None], [result, result], new=count if count is not None and count.is_extent else None)
