"""Convolutions and pooling: each row by itself; gradients of filters are sums over rows."""

from __future__ import annotations

from typing import Any

from keras_ddl.cut.registry import rule
from keras_ddl.cut.states import PARTIAL, Rows

# Which inputs have rows along axis 0; for gradients by the input's size, which input says the size.
_FORWARD = ("Conv2D", "Conv3D", "DepthwiseConv2dNative", "Dilation2D")
_POOLS = ("MaxPool", "AvgPool", "MaxPool3D", "AvgPool3D", "LRN", "SpaceToDepth", "DepthToSpace")
_OF_INPUT = ("Conv2DBackpropInput", "Conv3DBackpropInputV2", "DepthwiseConv2dNativeBackpropInput")
_OF_FILTER = ("Conv2DBackpropFilter", "Conv3DBackpropFilterV2", "DepthwiseConv2dNativeBackpropFilter")
_POOL_GRADIENTS = ("MaxPoolGrad", "MaxPool3DGrad", "MaxPoolGradGrad", "MaxPoolV2", "LRNGrad")
_POOL_GRADIENTS_BY_SIZE = ("AvgPoolGrad", "AvgPool3DGrad")
_RESIZE = ("ResizeBilinear", "ResizeNearestNeighbor", "ResizeBicubic", "ResizeArea", "ScaleAndTranslate")
_RESIZE_GRADIENTS = ("ResizeBilinearGrad", "ResizeBicubicGrad")


def _by_row(b: Any, node: Any, rowed: tuple[int, ...], size: int | None = None) -> Any:
    """Makes the operation of this rank's rows; None if nothing is cut along axis 0. Returns the cut, too."""
    cuts = [b.state(node.inputs[i]) for i in rowed]
    rows = next((each for each in cuts if isinstance(each, Rows) and each.axis == 0), None)
    if rows is None:
        return None
    if any(not b.fits(node.inputs[i], rows) for i in rowed):
        return None
    numbers = b.extents.numbers(node.inputs[size]) if size is not None else None
    if size is not None and (numbers is None or numbers.entries[0] != b.extent(rows)):
        return None
    b.wholes([each for i, each in enumerate(node.inputs) if i not in rowed and i != size])
    new = []
    for i, each in enumerate(node.inputs):
        if i == size:
            new.append(b.shape_tensor(numbers.entries, rows, each.dtype))
        else:
            new.append(b.cut(each, rows) if i in rowed else b.whole(each))
    return b.make(node, new), rows


def _keeping_rows(rowed: tuple[int, ...], size: int | None = None) -> Any:
    def apply(b: Any, node: Any) -> Any:
        found = _by_row(b, node, rowed, size)
        return None if found is None else [(each, found[1]) for each in found[0]]

    return apply


rule(*_FORWARD)(_keeping_rows((0,)))
rule(*_POOLS, *_RESIZE)(_keeping_rows((0,)))
rule(*_OF_INPUT)(_keeping_rows((2,), 0))
rule("MaxPoolGrad", "MaxPool3DGrad", "MaxPoolGradGrad", "LRNGrad")(_keeping_rows((0, 1, 2)))
rule(*_POOL_GRADIENTS_BY_SIZE)(_keeping_rows((1,), 0))
rule(*_RESIZE_GRADIENTS)(_keeping_rows((0, 1)))
rule("ResizeNearestNeighborGrad")(_keeping_rows((0,)))


@rule(*_OF_FILTER)
def filter_gradient(b: Any, node: Any) -> Any:
    found = _by_row(b, node, (0, 2))
    return None if found is None else [(each, PARTIAL) for each in found[0]]
