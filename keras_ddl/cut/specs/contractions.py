"""Matrix products, einsum, biases. A product contracted over rows, such as a gradient, gives each rank a part of a sum.

Parts of sums are summed before they are multiplied: parts may be 0, and 0 times inf in the other operand is NaN.
"""

from __future__ import annotations

from keras_ddl.cut.analysis.dims import Uncertain
from keras_ddl.cut.analysis.extents import Extents
from keras_ddl.cut.analysis.program import Node
from keras_ddl.cut.operations.factors import LABELS, Factors, Linear, broadcast_labels, labels_of, spec
from keras_ddl.cut.operations.propagation import is_alone


@spec("MatMul", combine="sum")
def _matmul(known: Extents, node: Node) -> Factors:
    first = "km" if node.attr("transpose_a", bool) else "mk"
    return Factors([first, "nk" if node.attr("transpose_b", bool) else "kn"], ["mn"])


@spec("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", combine="sum")
def _batch_matmul(known: Extents, node: Node) -> Factors:
    (first, second), out = broadcast_labels([known.dims(each)[:-2] for each in node.inputs])
    first += "zx" if node.attr("adj_x", bool) else "xz"
    return Factors([first, second + ("yz" if node.attr("adj_y", bool) else "zy")], [out + "xy"])


@spec("Einsum", combine="sum", linear=Linear(at=(0,), when=is_alone))
def _einsum(known: Extents, node: Node) -> Factors:
    operands, out = node.attr("equation", bytes).decode().replace(" ", "").split("->")
    labels = operands.split(",")
    letters = iter(LABELS)
    names = {each: next(letters, "") for each in dict.fromkeys(operands) if each.isalpha()}
    ellipsis = ""
    if "." in operands:
        fronts = []
        for text, value in zip(labels, node.inputs):
            if "..." in text:
                dims = known.dims(value)
                width = len(dims) - len(text.replace("...", ""))
                fronts.append(dims[text.index("...") :][:width])
        if any(each != fronts[0] for each in fronts):
            raise Uncertain
        ellipsis = "".join(next(letters, "") for _ in fronts[0])
    texts = [
        "".join(ellipsis if each == "." else names.get(each, "") for each in text.replace("...", "."))
        for text in [*labels, out]
    ]
    if any(len(set(text)) != len(text) for text in texts):
        raise Uncertain
    return Factors(texts[:-1], texts[-1:])


def _channels(labels: str, node: Node) -> str:
    return labels[1 if node.attr("data_format", bytes) == b"NCHW" else -1]


@spec("BiasAdd")
def _bias_add(known: Extents, node: Node) -> Factors:
    labels = labels_of(known.dims(node.inputs[0]))
    return Factors([labels, _channels(labels, node)], [labels])


@spec("BiasAddGrad", combine="sum", linear=Linear(at=(0,)))
def _bias_add_grad(known: Extents, node: Node) -> Factors:
    labels = labels_of(known.dims(node.inputs[0]))
    return Factors([labels], [_channels(labels, node)])
