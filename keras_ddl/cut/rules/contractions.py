"""Matrix products and einsum. A product contracted over rows gives each rank a part of a sum: gradients of weights."""

from __future__ import annotations

from typing import Any

from keras_ddl.cut.registry import rule
from keras_ddl.cut.states import PARTIAL, Partial, Rows, Whole


def contract(b: Any, node: Any, labels: list[str], out: str) -> Any:
    """Makes a product whose operands' axes have these labels.

    A label may be missing in an operand (an extent of 1 that is repeated): "1" stands for it.
    """
    values = list(node.inputs)
    states = [b.state(each) for each in values]
    if any(isinstance(each, Partial) for each in states):
        # Not times another operand: of inf there, parts that are 0 make NaN.
        if states == [PARTIAL]:
            return [(b.make(node, [b.held(each) for each in values])[0], PARTIAL)]
        b.wholes([value for value, state in zip(values, states) if isinstance(state, Partial)])
    states = [Whole() if isinstance(each, Partial) else each for each in states]
    choices = [(text[state.axis], state) for text, state in zip(labels, states) if isinstance(state, Rows)]
    if not choices:
        return None
    label, rows = _best(b, values, labels, choices)
    if label == "1":
        return None
    if label not in out and sum(label in text for text in labels) < len(labels):
        return None  # one operand's rows are summed before the product, and of inf in the other, parts make NaN
    new = []
    for value, text in zip(values, labels):
        if label in text:
            wanted = rows.at(text.index(label))
            if not b.fits(value, wanted) and b.state(value) != wanted:
                return None
            new.append((value, wanted))
        else:
            new.append((value, None))
    tensors = [b.whole(value) if wanted is None else b.cut(value, wanted) for value, wanted in new]
    return [(b.make(node, tensors)[0], rows.at(out.index(label)) if label in out else PARTIAL)]


def _best(b: Any, values: Any, labels: Any, choices: list[Any]) -> Any:
    """Of operands cut along different labels, the one stays cut that would have to be gathered; else the larger."""
    if len(choices) == 1 or choices[0][0] == choices[1][0] and choices[0][1].at(0) == choices[1][1].at(0):
        return choices[0]
    at_hand = [b.has_whole(each) for each in values]
    if at_hand[0] != at_hand[1]:
        return choices[at_hand.index(False)]
    sizes = [b.extents.size(each) for each in values]
    larger = sizes[1] is not None and sizes[0] is not None and _more(sizes[1], sizes[0])
    return choices[1 if larger else 0]


def _more(one: Any, other: Any) -> bool:
    return (len(one.unknowns), one.factor) > (len(other.unknowns), other.factor)


@rule("MatMul")
def matmul(b: Any, node: Any) -> Any:
    first = "km" if node.attr("transpose_a") else "mk"
    return contract(b, node, [first, "nk" if node.attr("transpose_b") else "kn"], "mn")


@rule("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3")
def batch_matmul(b: Any, node: Any) -> Any:
    dims = [b.dims(each) for each in node.inputs]
    if any(each is None for each in dims):
        return None
    most = max(map(len, dims)) - 2
    names = "ABCDEFGHIJ"[:most]
    fronts = []
    for own, other in (dims, dims[::-1]):
        front = ""
        skipped = most - (len(own) - 2)
        for axis in range(len(own) - 2):
            place = axis - (most - (len(other) - 2)) + skipped
            opposite = other[place] if place >= 0 else None
            repeated = own[axis] == 1 and opposite is not None and opposite != 1
            if opposite is not None and own[axis] != opposite and not repeated and opposite != 1:
                return None
            front += "1" if repeated else names[axis + skipped]
        fronts.append(front)
    first = fronts[0] + ("km" if node.attr("adj_x") else "mk")
    return contract(b, node, [first, fronts[1] + ("nk" if node.attr("adj_y") else "kn")], names + "mn")


@rule("Einsum")
def einsum(b: Any, node: Any) -> Any:
    operands, out = node.attr("equation").decode().replace(" ", "").split("->")
    labels = operands.split(",")
    if "." in operands:
        dims = [b.dims(each) for each in node.inputs]
        if any(each is None for each in dims):
            return None
        widths = {len(each) - len(text.replace("...", "")) for each, text in zip(dims, labels) if "..." in text}
        free = [each for each in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" if each not in node.attr("equation").decode()]
        if len(widths) != 1 or min(widths) < 0:
            return None
        ellipsis = "".join(free[: widths.pop()])
        fronts = [shape[text.index("...") :][: len(ellipsis)] for shape, text in zip(dims, labels) if "..." in text]
        if any(each != fronts[0] for each in fronts):
            return None
        labels = [text.replace("...", ellipsis) for text in labels]
        out = out.replace("...", ellipsis)
    if any(len(set(text)) != len(text) for text in [*labels, out]):
        return None
    return contract(b, node, labels, out)


@rule("BiasAdd")
def bias_add(b: Any, node: Any) -> Any:
    value, bias = node.inputs
    state, dims = b.state(value), b.dims(value)
    if not isinstance(state, Rows) or dims is None or state.axis == _channel(node, dims):
        return None
    return [(b.make(node, [b.held(value), b.whole(bias)])[0], state)]


@rule("BiasAddGrad")
def bias_add_grad(b: Any, node: Any) -> Any:
    value = node.inputs[0]
    state, dims = b.state(value), b.dims(value)
    if state == PARTIAL:
        return [(b.make(node, [b.held(value)])[0], PARTIAL)]
    if not isinstance(state, Rows) or dims is None or state.axis == _channel(node, dims):
        return None
    return [(b.make(node, [b.held(value)])[0], PARTIAL)]


def _channel(node: Any, dims: Any) -> int:
    return 1 if node.attr("data_format") == b"NCHW" else len(dims) - 1
