"""Convolutions and pooling: each row by itself; gradients of filters are sums over rows."""

from __future__ import annotations

from typing import Any

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.registry import rule
from keras_ddl.cut.rules.no_rows import at_least_one, without_it
from keras_ddl.cut.states import PARTIAL, Rows

# Which inputs have rows along axis 0; for gradients by the input's size, which input says the size.
_FORWARD = ("Conv2D", "Conv3D", "DepthwiseConv2dNative", "Dilation2D")
_POOLS = ("MaxPool", "AvgPool", "MaxPool3D", "AvgPool3D", "LRN", "SpaceToDepth", "DepthToSpace")
_OF_INPUT = ("Conv2DBackpropInput", "Conv3DBackpropInputV2", "DepthwiseConv2dNativeBackpropInput")
_OF_FILTER = ("Conv2DBackpropFilter", "Conv3DBackpropFilterV2", "DepthwiseConv2dNativeBackpropFilter")
# Of no rows the first's kernel leaves the sum as it finds the memory, and those of 3D pools end the process.
_NEVER_EMPTY = ("DepthwiseConv2dNativeBackpropFilter", "MaxPool3D", "MaxPool3DGrad", "AvgPool3D", "AvgPool3DGrad")
_POOL_GRADIENTS = ("MaxPoolGrad", "MaxPool3DGrad", "MaxPoolGradGrad", "LRNGrad")
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
    if size is not None and len(numbers.entries) != len(b.dims(node.inputs[rowed[0]])):
        return None  # height and width alone
    b.wholes([each for i, each in enumerate(node.inputs) if i not in rowed and i != size])
    never_empty = node.type in _NEVER_EMPTY
    new = []
    for i, each in enumerate(node.inputs):
        if i == size:
            shape = b.local_shape(numbers.entries, rows, each.dtype)
            new.append(tf.maximum(shape, 1) if never_empty else shape)
        else:
            tensor = b.cut(each, rows) if i in rowed else b.whole(each)
            new.append(at_least_one(b, tensor, 0) if i in rowed and never_empty else tensor)
    return b.make(node, new), rows


def _keeping_rows(rowed: tuple[int, ...], size: int | None = None) -> Any:
    def apply(b: Any, node: Any) -> Any:
        found = _by_row(b, node, rowed, size)
        if found is None:
            return None
        outputs, rows = found
        if node.type in _NEVER_EMPTY:
            outputs = [without_it(b, each, 0) for each in outputs]
        return [(each, rows) for each in outputs]

    return apply


rule(*_FORWARD)(_keeping_rows((0,)))
rule(*_POOLS, *_RESIZE)(_keeping_rows((0,)))
rule(*_OF_INPUT)(_keeping_rows((2,), 0))
rule(*_POOL_GRADIENTS)(_keeping_rows((0, 1, 2)))
rule(*_POOL_GRADIENTS_BY_SIZE)(_keeping_rows((1,), 0))
rule(*_RESIZE_GRADIENTS)(_keeping_rows((0, 1)))
rule("ResizeNearestNeighborGrad")(_keeping_rows((0,)))


@rule("ImageProjectiveTransformV2", "ImageProjectiveTransformV3")
def transformed(b: Any, node: Any) -> Any:
    """Images each with a transform of its own, or all with one."""
    dims = b.dims(node.inputs[1])
    one = dims is not None and dims[0] == 1 and not isinstance(b.state(node.inputs[1]), Rows)
    return _keeping_rows((0,) if one else (0, 1))(b, node)


@rule(*_OF_FILTER)
def filter_gradient(b: Any, node: Any) -> Any:
    found = _by_row(b, node, (0, 2))
    return None if found is None else [(each, PARTIAL) for each in found[0]]
