"""Specs of convolutions, pooling and resizing. Images are independent; gradients of filters are sums over images.

Channels are a factor if they are independent (pools, resizes, depthwise filters) or contracted (convolutions). Filters
[..., i, o] that are cut along o give channels that are cut; if they are cut along i, they give parts of a sum. Height
and width are replicated.
"""

from __future__ import annotations

from collections.abc import Callable

from keras_ddl.cut.analysis.dims import ONE, Dim, Uncertain, if_certain
from keras_ddl.cut.analysis.extents import Dims, Extents
from keras_ddl.cut.analysis.program import Node, Value
from keras_ddl.cut.operations.factors import NEW, Factors, FactorsOf, Operand, ShapeOf, spec

# Height and width (and depth) of images, of filters, and of the results of a convolution or a pool.
_IN, _FILTER, _OUT = "XYZ", "UVW", "RST"
_FIRST = (b"NCHW", b"NCDHW")
# Without rows, the first kernel leaves the sum uninitialized, and the kernels of 3D pools crash the process.
_NEVER_EMPTY = ["DepthwiseConv2dNativeBackpropFilter", "MaxPool3D", "MaxPool3DGrad", "AvgPool3D", "AvgPool3DGrad"]


def _specs(types: str, factors: FactorsOf, combine: str | None = None) -> None:
    for each in types.split():
        spec(each, combine=combine, never_empty=each in _NEVER_EMPTY)(factors)


def _extents_of(known: Extents, value: Value) -> Dims:
    """Returns the extents of images. Raises: Uncertain: their rank is unknown."""
    dims = known.dims(value)
    if len(dims) < 3:
        raise Uncertain
    return dims


def _image(node: Node, rank: int, space: str, channel: str) -> str:
    """Returns the labels of images: `a` for the images, one of `space` for each axis of an image, and `channel`."""
    return f"a{channel}{space[: rank - 2]}" if _is_first(node) else f"a{space[: rank - 2]}{channel}"


def _is_first(node: Node) -> bool:
    """Whether channels come before height and width."""
    has_format = any(each.name == "data_format" for each in node.operation.op_def.attr)
    return has_format and node.attr("data_format", bytes) in _FIRST


def _channel(node: Node, dims: Dims) -> Dim:
    return dims[1 if _is_first(node) else -1]


def _shape(known: Extents, node: Node, place: int, labels: str) -> ShapeOf:
    """Returns the operand that is the result's shape. Raises: Uncertain: it consists only of height and width."""
    if len(known.numbers(node.inputs[place])) != len(labels):
        raise Uncertain
    return ShapeOf(labels)


# ---- convolutions

_Channels = tuple[str, str, str, str]  # labels of the channels of images, of filters (in and out), and of results
_ChannelsOf = Callable[[Dim, Dims], _Channels]


def _contracted(channels: Dim, filters: Dims) -> _Channels:
    """Channels are contracted with filters, but replicated if filters take groups of channels."""
    return ("i", "i", "o", "o") if channels == filters[-2] else ("I", "J", "O", "O")


def _one_by_one(channels: Dim, filters: Dims) -> _Channels:
    """Filters [..., c, m] turn each of c channels into m; with m = 1, channels correspond one to one."""
    return ("c", "c", "M", "c") if filters[-1] == ONE else ("C", "C", "M", "N")


def _convolution(types: str, channels: _ChannelsOf, combine: str | None) -> None:
    """Registers the specs of a convolution, and of its gradients with respect to images and to filters."""

    def labels(node: Node, rank: int, of: _Channels) -> tuple[str, str, str]:
        images, into, out, made = of
        return (
            _image(node, rank, _IN, images),
            _FILTER[: rank - 2] + into + out,
            _image(node, rank, _OUT, made),
        )

    def forward(known: Extents, node: Node) -> Factors:
        dims = _extents_of(known, node.inputs[0])
        images, filters, made = labels(node, len(dims), channels(_channel(node, dims), known.dims(node.inputs[1])))
        return Factors([images, filters], [made])

    def image_gradient(known: Extents, node: Node) -> Factors:
        shape, filters = known.numbers(node.inputs[0]), known.dims(node.inputs[1])
        if len(shape) != len(filters):
            raise Uncertain
        images, kernel, made = labels(node, len(shape), channels(_channel(node, shape), filters))
        return Factors([ShapeOf(images), kernel, made], [images])

    def filter_gradient(known: Extents, node: Node) -> Factors:
        dims, filters = _extents_of(known, node.inputs[0]), known.numbers(node.inputs[1])
        images, kernel, made = labels(node, len(dims), channels(_channel(node, dims), filters))
        return Factors([images, _shape(known, node, 1, kernel), made], [kernel])

    name, input_type, filter_type = types.split()
    _specs(name, forward, combine)
    _specs(input_type, image_gradient, combine)
    _specs(filter_type, filter_gradient, "sum")


_convolution("Conv2D Conv2DBackpropInput Conv2DBackpropFilter", _contracted, "sum")
_convolution("Conv3D Conv3DBackpropInputV2 Conv3DBackpropFilterV2", _contracted, "sum")
_convolution(
    "DepthwiseConv2dNative DepthwiseConv2dNativeBackpropInput DepthwiseConv2dNativeBackpropFilter", _one_by_one, None
)


@spec("Dilation2D")
def _dilation(known: Extents, node: Node) -> Factors:
    return Factors(["aXYc", "UVc"], ["aRSc"])


# ---- pools


def _pooled(node: Node) -> str:
    """Returns the label of channels: pools seldom extend over them."""
    return "c" if node.attr("ksize", list)[1 if _is_first(node) else -1] == 1 else "C"


def _pool(known: Extents, node: Node) -> Factors:
    rank, channel = len(_extents_of(known, node.inputs[0])), _pooled(node)
    return Factors([_image(node, rank, _IN, channel)], [_image(node, rank, _OUT, channel)])


def _pool_gradient(known: Extents, node: Node) -> Factors:
    """Operands: images, the results of a pool, and a gradient of either."""
    rank, channel = len(_extents_of(known, node.inputs[0])), _pooled(node)
    images, made = _image(node, rank, _IN, channel), _image(node, rank, _OUT, channel)
    is_second_gradient = node.type.endswith("GradGrad")
    return Factors([images, made, images if is_second_gradient else made], [made if is_second_gradient else images])


def _average_gradient(known: Extents, node: Node) -> Factors:
    rank, channel = len(_extents_of(known, node.inputs[1])), _pooled(node)
    images = _image(node, rank, _IN, channel)
    return Factors([_shape(known, node, 0, images), _image(node, rank, _OUT, channel)], [images])


_specs("MaxPool AvgPool MaxPool3D AvgPool3D", _pool)
_specs("MaxPoolGrad MaxPool3DGrad MaxPoolGradGrad", _pool_gradient)
_specs("AvgPoolGrad AvgPool3DGrad", _average_gradient)


# ---- others


def _each(known: Extents, node: Node) -> Factors:
    """For operations that mix channels, or mix them with height and width."""
    return Factors(["aXYC", *[None] * (len(node.inputs) - 1)], ["a" + NEW * 3])


_specs("LRN SpaceToDepth DepthToSpace ExtractImagePatches", _each)


@spec("LRNGrad")
def _normalized_gradient(known: Extents, node: Node) -> Factors:
    return Factors(["aXYC"] * 3, ["aXYC"])


def _resize(known: Extents, node: Node) -> Factors:
    return Factors(["aXYc", *[None] * (len(node.inputs) - 1)], ["aRSc"])


def _resize_gradient(known: Extents, node: Node) -> Factors:
    return Factors(["aRSc", "aXYc"], ["aXYc"])


_specs("ResizeBilinear ResizeNearestNeighbor ResizeBicubic ResizeArea ScaleAndTranslate", _resize)
_specs("ResizeNearestNeighborGrad", _resize)
_specs("ResizeBilinearGrad ResizeBicubicGrad", _resize_gradient)


@spec("ImageProjectiveTransformV2", "ImageProjectiveTransformV3")
def _transformed(known: Extents, node: Node) -> Factors:
    """There is one transform for each image, or one for all images."""
    images, transforms = known.dims(node.inputs[0]), known.dims(node.inputs[1])
    size = if_certain(known.numbers, node.inputs[2])
    one = transforms[0] == Dim(1) and images[0] != 1
    # The result's height and width are numbers in the third operand, which a rank must not adapt as it adapts a shape.
    known_size = size is not None and len(size) == 2
    operands: list[Operand] = ["aBCd", "1E" if one else "aE", *[None] * (len(node.inputs) - 2)]
    if known_size:
        operands[2] = ShapeOf("XY")
    return Factors(operands, ["aXYd" if known_size else "a" + NEW * 2 + "d"])
