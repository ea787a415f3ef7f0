"""Convolutions and pools of images that are cut along their channels, or with filters that are: the model axis.

Filters [..., i, o] take i channels and give o. Cut along o they give channels that are cut, and along i parts of a sum.
"""

from __future__ import annotations

from collections.abc import Callable

from keras_ddl.cut.context import Context
from keras_ddl.cut.placements import PARTIAL, PlacedOutputs, Sharded
from keras_ddl.cut.program import Node, Value
from keras_ddl.cut.propagation import propagate
from keras_ddl.cut.registry import Rule, rule

_LAST = (b"NHWC", b"NDHWC")


def _rule(*types: str) -> Callable[[Rule], Rule]:
    """Registers what builds operations in the cut along the model axis, where it can; else their specs do."""

    def register(function: Rule) -> Rule:
        def build(b: Context, node: Node) -> PlacedOutputs | None:
            made = None if b.rows_by_extent or node.attr("data_format", bytes) not in _LAST else function(b, node)
            return propagate(b, node) if made is None else made

        rule(*types)(build)
        return function

    return register


@_rule("Conv2D", "Conv3D")
def convolution(b: Context, node: Node) -> PlacedOutputs | None:
    images, filters = node.inputs
    if b.dims(images)[-1] != b.dims(filters)[-2]:  # groups of channels
        return None
    last = len(b.dims(filters)) - 1
    cut = _cut(b, filters, last)
    if cut is not None:
        return [(b.make(node, [b.replicated(images), b.local(filters)])[0], cut.at(len(b.dims(images)) - 1))]
    cut = _cut(b, filters, last - 1) or _cut(b, images, len(b.dims(images)) - 1)
    if cut is None:
        return None
    operands = [b.sharded(images, cut.at(len(b.dims(images)) - 1)), b.sharded(filters, cut.at(last - 1))]
    return [(b.make(node, operands)[0], PARTIAL)]


@_rule("Conv2DBackpropInput", "Conv3DBackpropInputV2")
def gradient_of_images(b: Context, node: Node) -> PlacedOutputs | None:
    shape, filters, gradient = node.inputs
    extents = b.extents.numbers(shape)
    if len(extents) != len(b.dims(gradient)) or extents[-1] != b.dims(filters)[-2]:
        return None
    channels, last = len(extents) - 1, len(b.dims(filters)) - 1
    cut = _cut(b, filters, last - 1)
    if cut is not None:
        result = cut.at(channels)
        local = b.local_shape(extents, result, shape.dtype)
        return [(b.make(node, [local, b.local(filters), b.replicated(gradient)])[0], result)]
    cut = _cut(b, filters, last) or _cut(b, gradient, channels)
    if cut is None:
        return None
    operands = [b.replicated(shape), b.sharded(filters, cut.at(last)), b.sharded(gradient, cut.at(channels))]
    return [(b.make(node, operands)[0], PARTIAL)]


@_rule("Conv2DBackpropFilter", "Conv3DBackpropFilterV2")
def gradient_of_filters(b: Context, node: Node) -> PlacedOutputs | None:
    images, shape, gradient = node.inputs
    extents = b.extents.numbers(shape)
    if b.dims(images)[-1] != extents[-2]:
        return None
    channels, last = len(b.dims(images)) - 1, len(extents) - 1
    for operand, axis in ((gradient, last), (images, last - 1)):
        cut = _cut(b, operand, channels)
        if cut is not None:
            result = cut.at(axis)
            tensors = [b.local(each) if each is operand else b.replicated(each) for each in (images, gradient)]
            local = b.local_shape(extents, result, shape.dtype)
            return [(b.make(node, [tensors[0], local, tensors[1]])[0], result)]
    return None


@_rule("MaxPool", "AvgPool", "MaxPool3D", "AvgPool3D", "MaxPoolGrad", "MaxPool3DGrad")
def pool(b: Context, node: Node) -> PlacedOutputs | None:
    """Each channel by itself."""
    last = len(b.dims(node.inputs[0])) - 1
    cut = next(filter(None, (_cut(b, each, last) for each in node.inputs)), None)
    if cut is None or node.attr("ksize", list)[-1] != 1:
        return None
    return [(b.make(node, [b.sharded(each, cut) for each in node.inputs])[0], cut)]


@_rule("AvgPoolGrad", "AvgPool3DGrad")
def gradient_of_average(b: Context, node: Node) -> PlacedOutputs | None:
    shape, gradient = node.inputs
    cut = _cut(b, gradient, len(b.dims(gradient)) - 1)
    if cut is None or node.attr("ksize", list)[-1] != 1:
        return None
    local = b.local_shape(b.extents.numbers(shape), cut, shape.dtype)
    return [(b.make(node, [local, b.local(gradient)])[0], cut)]


def _cut(b: Context, value: Value, axis: int) -> Sharded | None:
    """Returns the placement of a value that is cut along this axis; None: it is not."""
    placement = b.placement(value)
    return placement if isinstance(placement, Sharded) and placement.axis == axis else None
