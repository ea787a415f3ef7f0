"""Extents of what operations give; imported for what it registers in extents.py."""

from __future__ import annotations

from collections.abc import Sequence

from keras_ddl.cut.axes import reduced_axes, squeezed_axes
from keras_ddl.cut.dims import ONE, Dim, product, total
from keras_ddl.cut.entrywise import BINARY, UNARY
from keras_ddl.cut.extents import Dims, Extents, broadcast, extents
from keras_ddl.cut.program import Node, Value

# Of each output an extent per axis, None where it cannot be told; None for all of an output.
Told = list[Sequence[Dim | None] | None]


def _first_input(known: Extents, node: Node) -> Told:
    return [known.dims(node.inputs[0])] * len(node.outputs)


_AS_THE_FIRST = (
    "Identity IdentityN StopGradient PreventGradient Softmax LogSoftmax BiasAdd Cumsum Cumprod ReverseV2 Snapshot "
    "CheckNumerics StringLower StringUpper StringStrip StringLength AsString StringToNumber StringToHashBucket "
    "StringToHashBucketFast StringToHashBucketStrong StaticRegexReplace StaticRegexFullMatch RegexReplace "
    "RegexFullMatch DecodeBase64 EncodeBase64 UnicodeTranscode UnicodeScript Bucketize RandomShuffle "
    "ReverseSequence MatrixBandPart"
)
extents(*UNARY, *_AS_THE_FIRST.split())(_first_input)


@extents("IdentityN")
def _identity_n(known: Extents, node: Node) -> Told:
    return [known.dims(each) for each in node.inputs]


@extents(*BINARY, "AddN", "StringJoin", "Substr", "ApproximateEqual", "Betainc", "ClipByValue")
def _broadcast(known: Extents, node: Node) -> Told:
    return [broadcast([known.dims(each) for each in node.inputs])]


@extents("Select")
def _select(known: Extents, node: Node) -> list[Dims | None]:
    return [known.dims(node.inputs[1])]


@extents("Reshape")
def _reshape(known: Extents, node: Node) -> Told:
    wanted = known.numbers(node.inputs[1])
    if wanted is None:
        return [None]
    if all(each.is_extent for each in wanted.entries):
        return [wanted.entries]
    # An entry of which nothing is known may be -1, too: then nothing else may be told by it.
    total = known.size(node.inputs[0])
    open_axes = [each for each in wanted.entries if not each.is_extent]
    if open_axes != [Dim(-1)] or total is None:
        return [[each if each.is_extent else None for each in wanted.entries]]
    rest = total.divided_by(product(each for each in wanted.entries if each.is_extent))
    return [[each if each.is_extent else rest for each in wanted.entries]]


@extents("ExpandDims")
def _expand_dims(known: Extents, node: Node) -> Told:
    dims, axis = known.dims(node.inputs[0]), known.number(node.inputs[1])
    if dims is None or axis is None or axis.number is None:
        return [None]
    at = axis.number % (len(dims) + 1)
    return [(*dims[:at], ONE, *dims[at:])]


@extents("Squeeze")
def _squeeze(known: Extents, node: Node) -> Told:
    dims = known.dims(node.inputs[0])
    if dims is None:
        return [None]
    axes = squeezed_axes(dims, node)
    if axes is None:
        return [None]
    return [tuple(each for axis, each in enumerate(dims) if axis not in axes)]


@extents("Transpose")
def _transpose(known: Extents, node: Node) -> Told:
    dims, order = known.dims(node.inputs[0]), known.constants(node.inputs[1])
    return [None if dims is None or order is None else [dims[axis] for axis in order]]


@extents("Sum", "Mean", "Max", "Min", "Prod", "All", "Any", "EuclideanNorm")
def _reduce(known: Extents, node: Node) -> Told:
    dims, axes = known.dims(node.inputs[0]), reduced_axes(known, node.inputs[1])
    if dims is None or axes is None or axes[1] and not node.attr("keep_dims"):
        return [None]
    gone = {axis % max(len(dims), 1) for axis in axes[0]}
    if node.attr("keep_dims"):
        return [[ONE if axis in gone else each for axis, each in enumerate(dims)]]
    return [[each for axis, each in enumerate(dims) if axis not in gone]]


@extents("ArgMax", "ArgMin")
def _arg_max(known: Extents, node: Node) -> Told:
    dims, axis = known.dims(node.inputs[0]), known.number(node.inputs[1])
    if dims is None or axis is None or axis.number is None:
        return [None]
    return [[each for at, each in enumerate(dims) if at != axis.number % len(dims)]]


@extents("MatMul")
def _matmul(known: Extents, node: Node) -> Told:
    a, b = (known.dims(each) for each in node.inputs)
    if a is None or b is None:
        return [None]
    return [[a[1 if node.attr("transpose_a") else 0], b[0 if node.attr("transpose_b") else 1]]]


@extents("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3")
def _batch_matmul(known: Extents, node: Node) -> Told:
    a, b = (known.dims(each) for each in node.inputs)
    if a is None or b is None:
        return [None]
    front = broadcast([a[:-2], b[:-2]])
    return [[*front, a[-1 if node.attr("adj_x") else -2], b[-2 if node.attr("adj_y") else -1]]]


@extents("Fill", "BroadcastTo")
def _filled(known: Extents, node: Node) -> Told:
    shape = known.numbers(node.inputs[0 if node.type == "Fill" else 1])
    return [None if shape is None or any(each == -1 for each in shape.entries) else shape.entries]


@extents("Pack")
def _packed(known: Extents, node: Node) -> Told:
    dims = known.dims(node.inputs[0])
    if dims is None:
        return [None]
    axis = node.attr("axis") % (len(dims) + 1)
    return [(*dims[:axis], Dim(len(node.inputs)), *dims[axis:])]


@extents("Unpack")
def _unpacked(known: Extents, node: Node) -> Told:
    dims = known.dims(node.inputs[0])
    if dims is None:
        return [None] * len(node.outputs)
    axis = node.attr("axis") % len(dims)
    return [(*dims[:axis], *dims[axis + 1 :])] * len(node.outputs)


@extents("ConcatV2")
def _concatenated(known: Extents, node: Node) -> Told:
    parts, axis = [known.dims(each) for each in node.inputs[:-1]], known.number(node.inputs[-1])
    if any(each is None for each in parts) or axis is None or axis.number is None or not parts[0]:
        return [None]
    at = axis.number % len(parts[0])
    extent = total([each[at] for each in parts])
    return [[extent if a == at else each for a, each in enumerate(parts[0])]]


@extents("GatherV2", "ResourceGather")
def _gathered(known: Extents, node: Node) -> Told:
    if node.type == "ResourceGather":
        at = known.dims(node.inputs[1])
        return [None if at is None or node.outputs[0].rank is None else _tail(at, node.outputs[0])]
    dims, at, axis = known.dims(node.inputs[0]), known.dims(node.inputs[1]), known.number(node.inputs[2])
    if dims is None or at is None or axis is None or axis.number is None:
        return [None]
    position, batch = axis.number % len(dims), node.attr("batch_dims") % max(len(at), 1)
    return [(*dims[:position], *at[batch:], *dims[position + 1 :])]


def finds_for_each_key(node: Node) -> bool:
    """Whether a look-up certainly gives an entry for each entry of the keys.

    Tables may have vectors for keys or values. Dense tables alone have such keys, and what tf.lookup finds in one has
    no shape when it is traced, unless the table is made inside of the step.
    """
    table, keys = node.inputs[0].node, node.inputs[1]
    while table.type == "Identity":
        table = table.inputs[0].node
    is_dense = table.type.startswith("MutableDenseHashTable")
    return keys.rank is not None and node.outputs[0].rank == keys.rank and not is_dense


@extents("DenseBincount")
def _counted_entries(known: Extents, node: Node) -> Told:
    dims, size = known.dims(node.inputs[0]), known.number(node.inputs[1])
    return [None if dims is None or not dims else (*dims[:-1], size)]


@extents("LookupTableFindV2")
def _found(known: Extents, node: Node) -> Told:
    return [known.dims(node.inputs[1]) if finds_for_each_key(node) else None]


def _tail(front: Dims, output: Value) -> list[Dim | None]:
    rest = output.shape.as_list()[len(front) :]
    return [*front, *(None if each is None else Dim(each) for each in rest)]


@extents("OneHot")
def _one_hot(known: Extents, node: Node) -> Told:
    dims, depth = known.dims(node.inputs[0]), known.number(node.inputs[1])
    if dims is None:
        return [None]
    axis = node.attr("axis") % (len(dims) + 1)
    return [(*dims[:axis], depth, *dims[axis:])]


@extents("SparseSoftmaxCrossEntropyWithLogits")
def _sparse_cross_entropy(known: Extents, node: Node) -> Told:
    dims = known.dims(node.inputs[0])
    return [None if dims is None else dims[:1], dims]


@extents("SoftmaxCrossEntropyWithLogits")
def _cross_entropy(known: Extents, node: Node) -> Told:
    """Logits and labels broadcast against each other."""
    dims = broadcast([known.dims(each) for each in node.inputs])
    return [None if dims is None else dims[:1], dims]


@extents("ImageProjectiveTransformV2", "ImageProjectiveTransformV3")
def _transformed(known: Extents, node: Node) -> Told:
    dims, size = known.dims(node.inputs[0]), known.numbers(node.inputs[2])
    if dims is None or size is None or len(size.entries) != 2:
        return [None]
    return [(dims[0], *(each if each.is_extent else None for each in size.entries), dims[3])]


@extents("Range")
def _range(known: Extents, node: Node) -> Told:
    start, limit, step = (known.number(each) if each.dtype.is_integer else None for each in node.inputs)
    if start != 0 or step != 1 or limit is None:
        return [None]
    return [[limit] if limit.is_extent else None]


@extents("Tile")
def _tiled(known: Extents, node: Node) -> Told:
    dims, times = known.dims(node.inputs[0]), known.numbers(node.inputs[1])
    return [None if dims is None or times is None else [a * b for a, b in zip(dims, times.entries)]]


_FROM_SHAPE = (
    "RandomStandardNormal RandomUniform RandomUniformInt TruncatedNormal StatelessRandomUniformV2 "
    "StatelessRandomNormalV2 StatelessTruncatedNormalV2 StatelessRandomUniformFullIntV2 StatelessRandomUniformIntV2 "
    "StatelessRandomUniform StatelessRandomNormal StatelessTruncatedNormal StatelessRandomUniformInt Empty"
)


@extents(*_FROM_SHAPE.split())
def _drawn(known: Extents, node: Node) -> Told:
    shape = known.numbers(node.inputs[0])
    return [None if shape is None else shape.entries]


@extents("UnsortedSegmentSum", "UnsortedSegmentMax", "UnsortedSegmentMin", "UnsortedSegmentProd")
def _segments(known: Extents, node: Node) -> Told:
    data, ids, count = known.dims(node.inputs[0]), known.dims(node.inputs[1]), known.number(node.inputs[2])
    return [None if data is None or ids is None else (count, *data[len(ids) :])]
