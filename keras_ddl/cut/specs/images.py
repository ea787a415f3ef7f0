"""Convolutions, pooling, resizing: each image by itself; gradients of filters are sums over images."""

from __future__ import annotations

from keras_ddl.cut.dims import Dim, Uncertain, if_certain
from keras_ddl.cut.extents import Extents
from keras_ddl.cut.factors import NEW, Factors, FactorsOf, Operand, ShapeOf, labels_of, spec
from keras_ddl.cut.program import Node

_CONVOLUTIONS = "Conv2D Conv3D DepthwiseConv2dNative Dilation2D"
_OF_INPUT = "Conv2DBackpropInput Conv3DBackpropInputV2 DepthwiseConv2dNativeBackpropInput"
_OF_FILTER = "Conv2DBackpropFilter Conv3DBackpropFilterV2 DepthwiseConv2dNativeBackpropFilter"
_POOLS = "MaxPool AvgPool MaxPool3D AvgPool3D LRN SpaceToDepth DepthToSpace ExtractImagePatches"
_RESIZES = "ResizeBilinear ResizeNearestNeighbor ResizeBicubic ResizeArea ScaleAndTranslate ResizeNearestNeighborGrad"
# Given no rows, the kernel of the first leaves the sum uninitialized, and those of 3D pools crash the process.
_NEVER_EMPTY = ["DepthwiseConv2dNativeBackpropFilter", "MaxPool3D", "MaxPool3DGrad", "AvgPool3D", "AvgPool3DGrad"]


def _images(*places: int, shape: int | None = None, summed: bool = False) -> FactorsOf:
    """Returns what gives the factors of operations on images [n, ...]: n is passed on, everything else replicated.

    places: the operands that are images. shape: the operand that is the shape of the result. summed: over the images.
    """

    def factors(known: Extents, node: Node) -> Factors:
        operands: list[Operand] = [None] * len(node.inputs)
        rank = 0
        for place in places:
            dims = known.dims(node.inputs[place])
            if not dims:
                raise Uncertain
            rank = len(dims)
            operands[place] = labels_of(dims, range(1, rank))
        result = NEW * (node.outputs[0].rank or rank) if summed else "a" + NEW * (rank - 1)
        if shape is not None:
            if len(known.numbers(node.inputs[shape])) != rank:
                raise Uncertain  # height and width alone
            result = "a" + "".join(chr(ord("B") + axis) for axis in range(rank - 1))
            operands[shape] = ShapeOf(result)
        return Factors(operands, [result] * len(node.outputs))

    return factors


def _specs(types: str, factors: FactorsOf, combine: str | None = None) -> None:
    for each in types.split():
        spec(each, combine=combine, never_empty=each in _NEVER_EMPTY)(factors)


_specs(_CONVOLUTIONS, _images(0))
_specs(_OF_INPUT, _images(2, shape=0))
_specs(_OF_FILTER, _images(0, 2, summed=True), combine="sum")
_specs(_POOLS, _images(0))
_specs("MaxPoolGrad MaxPool3DGrad MaxPoolGradGrad LRNGrad", _images(0, 1, 2))
_specs("AvgPoolGrad AvgPool3DGrad", _images(1, shape=0))
_specs(_RESIZES, _images(0))
_specs("ResizeBilinearGrad ResizeBicubicGrad", _images(0, 1))


@spec("ImageProjectiveTransformV2", "ImageProjectiveTransformV3")
def _transformed(known: Extents, node: Node) -> Factors:
    """Images each with a transform of its own, or all with one."""
    images, transforms = known.dims(node.inputs[0]), known.dims(node.inputs[1])
    size = if_certain(known.numbers, node.inputs[2])
    one = transforms[0] == Dim(1) and images[0] != 1
    # Height and width of the result are the numbers of the third operand, not a shape that a rank would change.
    known_size = size is not None and len(size) == 2
    operands: list[Operand] = ["aBCD", "1E" if one else "aE", *[None] * (len(node.inputs) - 2)]
    if known_size:
        operands[2] = ShapeOf("XY")
    return Factors(operands, ["aXYD" if known_size else "a" + NEW * 2 + "D"])
