"""Operations along the last axis, each row by itself: softmax, cross entropies, the best k."""

from __future__ import annotations

from keras_ddl.cut.extents import Extents
from keras_ddl.cut.factors import NEW, Factors, broadcast_labels, labels_of, spec
from keras_ddl.cut.program import Node


@spec("Softmax", "LogSoftmax")
def _softmax(known: Extents, node: Node) -> Factors | None:
    labels = labels_of(known.dims(node.inputs[0]), [-1])
    return None if labels is None else Factors([labels], [labels])


@spec("SparseSoftmaxCrossEntropyWithLogits")
def _sparse_cross_entropy(known: Extents, node: Node) -> Factors:
    return Factors(["rC", "r"], ["r", "rC"])


@spec("SoftmaxCrossEntropyWithLogits")
def _cross_entropy(known: Extents, node: Node) -> Factors | None:
    """Logits and labels are broadcast against each other."""
    labels = broadcast_labels([known.dims(each) for each in node.inputs])
    if labels is None:
        return None
    operands, result = [each.replace("b", "B") for each in labels[0]], labels[1].replace("b", "B")
    return Factors(operands, [result[:1], result])


@spec("InTopK", "InTopKV2")
def _in_top_k(known: Extents, node: Node) -> Factors:
    return Factors(["rC", "r", None][: len(node.inputs)], ["r"])


@spec("TopKV2")
def _top_k(known: Extents, node: Node) -> Factors | None:
    labels = labels_of(known.dims(node.inputs[0]), [-1])
    if labels is None:
        return None
    count = known.number(node.inputs[1])
    result = labels[:-1] + NEW
    return Factors([labels, None], [result, result], new=count if count is not None and count.is_extent else None)
