"""Extents and integer values that operations on shapes give; imported for what it registers in extents.py."""

from __future__ import annotations

from typing import Any

from keras_ddl.cut.dims import ONE, Dim, product
from keras_ddl.cut.extents import MOST_VALUES, Dims, Extents, Numbers, broadcast, extents, numbers
from keras_ddl.cut.program import Node, Value

# ---- values


@numbers("Identity", "Cast", "StopGradient", "PreventGradient", "Squeeze", "ExpandDims", "Reshape", "EnsureShape")
def _same(known: Extents, node: Node) -> Numbers | None:
    found = known.numbers(node.inputs[0])
    if found is None and node.type == "Reshape" and node.inputs[0].dtype.is_integer:
        constant = node.inputs[0].constant()
        found = None if constant is None or constant.size > MOST_VALUES else Numbers(constant.ravel().tolist())
    if found is None or not node.inputs[0].dtype.is_integer:
        return None
    if node.outputs[0].rank not in (0, 1):
        return None
    return Numbers(found.entries, node.outputs[0].rank == 0)


@numbers("Shape", "ShapeN")
def _shape(known: Extents, node: Node) -> list[Numbers | None]:
    dims = [known.dims(each) for each in node.inputs]
    return [None if each is None else Numbers(each) for each in dims]


@numbers("Size")
def _size(known: Extents, node: Node) -> Numbers | None:
    size = known.size(node.inputs[0])
    return None if size is None else Numbers([size], True)


@numbers("Pack")
def _pack(known: Extents, node: Node) -> Numbers | None:
    entries = [known.number(each) if each.rank == 0 else None for each in node.inputs]
    return None if any(each is None for each in entries) else Numbers(entries)


@numbers("ConcatV2")
def _concat(known: Extents, node: Node) -> Numbers | None:
    parts = [known.numbers(each) for each in node.inputs[:-1]]
    return None if any(each is None for each in parts) else Numbers([e for each in parts for e in each.entries])


@numbers("Unpack")
def _unpack(known: Extents, node: Node) -> list[Numbers | None] | None:
    found = known.numbers(node.inputs[0])
    return None if found is None else [Numbers([each], True) for each in found.entries]


@numbers("Prod")
def _prod(known: Extents, node: Node) -> Numbers | None:
    found = known.numbers(node.inputs[0])
    if found is None or found.is_scalar or known.constants(node.inputs[1]) not in ([0], [-1]):
        return None
    return Numbers([product(found.entries)], node.outputs[0].rank == 0)


def _of_two(apply: Any) -> Any:
    def rule(known: Extents, node: Node) -> Numbers | None:
        a, b = (known.numbers(each) for each in node.inputs)
        if a is None or b is None:
            return None
        length = max(len(a.entries), len(b.entries))
        if {len(a.entries), len(b.entries)} - {1, length}:
            return None
        pairs = [(each.entries * length)[:length] if len(each.entries) == 1 else each.entries for each in (a, b)]
        return Numbers([apply(one, other) for one, other in zip(*pairs)], node.outputs[0].rank == 0)

    return rule


numbers("Mul")(_of_two(lambda a, b: a * b))
numbers("Add", "AddV2")(_of_two(lambda a, b: a + b))
numbers("Sub")(_of_two(lambda a, b: a - b))
numbers("Maximum")(_of_two(lambda a, b: a.larger_of(b)))
numbers("Minimum")(_of_two(lambda a, b: a.smaller_of(b)))


@numbers("FloorDiv")
def _floor_div(known: Extents, node: Node) -> Numbers | None:
    b = known.numbers(node.inputs[1])
    if b is None or any(each == 0 for each in b.entries):
        return None
    return _of_two(lambda one, other: one.floor_divided_by(other))(known, node)


@numbers("FloorMod")
def _floor_mod(known: Extents, node: Node) -> Numbers | None:
    a, b = (known.constants(each) for each in node.inputs)
    if a is None or b is None or len(b) != 1 or b[0] == 0:
        return None
    return Numbers([each % b[0] for each in a], node.outputs[0].rank == 0)


@numbers("Range")
def _counted(known: Extents, node: Node) -> Numbers | None:
    found = [known.constants(each) for each in node.inputs]
    if any(each is None for each in found) or found[2] == [0]:
        return None
    entries = range(*(each[0] for each in found))
    return Numbers(entries) if len(entries) <= MOST_VALUES else None


@numbers("Fill")
def _repeated(known: Extents, node: Node) -> Numbers | None:
    length, entry = known.constants(node.inputs[0]), known.number(node.inputs[1])
    if entry is None or length is None or len(length) != 1 or length[0] > MOST_VALUES:
        return None
    return Numbers([entry] * length[0])


@numbers("DynamicStitch")
def _stitched(known: Extents, node: Node) -> Numbers | None:
    """How gradients of reductions make the shape with the reduced axes kept: the later entry counts."""
    count = len(node.inputs) // 2
    found: dict[int, Dim] = {}
    for at, data in zip(node.inputs[:count], node.inputs[count:]):
        places, entries = known.constants(at), known.numbers(data)
        if places is None or entries is None or len(places) != len(entries.entries):
            return None
        found.update(zip(places, entries.entries))
    if sorted(found) != list(range(len(found))):
        return None
    return Numbers([found[i] for i in range(len(found))])


@numbers("GatherV2")
def _gather(known: Extents, node: Node) -> Numbers | None:
    found, at = known.numbers(node.inputs[0]), known.constants(node.inputs[1])
    if found is None or at is None or found.is_scalar or any(not 0 <= i < len(found.entries) for i in at):
        return None
    return Numbers([found.entries[i] for i in at], node.outputs[0].rank == 0)


@numbers("Slice")
def _slice(known: Extents, node: Node) -> Numbers | None:
    found, begin, size = known.numbers(node.inputs[0]), known.constants(node.inputs[1]), known.constants(node.inputs[2])
    if found is None or begin is None or size is None or found.is_scalar:
        return None
    end = len(found.entries) if size[0] == -1 else begin[0] + size[0]
    return Numbers(found.entries[begin[0] : end])


@numbers("StridedSlice")
def _strided_slice(known: Extents, node: Node) -> Numbers | None:
    found = known.numbers(node.inputs[0])
    if found is None or found.is_scalar or node.attr("new_axis_mask") or node.attr("ellipsis_mask"):
        return None
    begin, end, stride = (known.constants(each) for each in node.inputs[1:])
    if begin is None or stride is None or len(begin) != 1:
        return None
    if node.attr("shrink_axis_mask"):
        at = begin[0]
        return Numbers([found.entries[at]], True) if -len(found.entries) <= at < len(found.entries) else None
    if end is None and not node.attr("end_mask"):
        return None
    first = None if node.attr("begin_mask") else begin[0]
    last = None if node.attr("end_mask") else end[0]
    return Numbers(found.entries[slice(first, last, stride[0])])


@numbers("ConcatOffset")
def _offsets(known: Extents, node: Node) -> list[Numbers | None] | None:
    """Where the parts of a concatenation begin."""
    axis, shapes = known.constants(node.inputs[0]), [known.numbers(each) for each in node.inputs[1:]]
    if axis is None or any(each is None for each in shapes) or not 0 <= axis[0] < len(shapes[0].entries):
        return None
    found: list[Numbers | None] = []
    start = Dim(0)
    for each in shapes:
        found.append(Numbers([start if at == axis[0] else Dim(0) for at in range(len(each.entries))]))
        start = start + each.entries[axis[0]]
    return found


@numbers("InvertPermutation")
def _inverted(known: Extents, node: Node) -> Numbers | None:
    order = known.constants(node.inputs[0])
    if order is None or sorted(order) != list(range(len(order))):
        return None
    return Numbers([order.index(i) for i in range(len(order))])


@numbers("BroadcastArgs")
def _broadcast_args(known: Extents, node: Node) -> Numbers | None:
    shapes = [known.numbers(each) for each in node.inputs]
    if any(each is None for each in shapes):
        return None
    found = broadcast([each.entries for each in shapes])
    return None if found is None or any(each is None for each in found) else Numbers(found)


def reduced_axes(known: Extents, value: Value) -> tuple[list[int], frozenset[int]] | None:
    """Returns the axes that an operand names to be reduced, and axes that it may name besides, if their extent is 1.

    The gradient of a broadcast names axes along which the operand was repeated. Where both extents are 1 it names the
    axis, too, which changes nothing but the number of axes.
    """
    certain = known.constants(value)
    if certain is not None:
        return certain, frozenset()
    node = value.node
    if node.type != "BroadcastGradientArgs":
        return None
    shapes = [known.numbers(each) for each in node.inputs]
    if any(each is None for each in shapes):
        return None
    rank = max(len(each.entries) for each in shapes)
    own, other = ((ONE,) * (rank - len(each.entries)) + each.entries for each in shapes)
    if value.index == 1:
        own, other = other, own
    axes, perhaps = [], set()
    for axis, (a, b) in enumerate(zip(own, other)):
        if a == 1:
            axes.append(axis)
        elif a.number is None and (a == b or b == 1):
            perhaps.add(axis)
        elif a.number is None:
            return None
    return axes, frozenset(perhaps)


# ---- extents


def _first_input(known: Extents, node: Node) -> list[Dims | None]:
    return [known.dims(node.inputs[0])] * len(node.outputs)


SAME = (
    "Identity IdentityN Neg Exp Log Log1p Expm1 Sqrt Rsqrt Square Tanh Sigmoid Relu Relu6 Elu Selu Softplus Softsign "
    "Abs Sign Floor Ceil Round Rint Reciprocal Inv Erf Erfc Erfinv Lgamma Digamma Sin Cos Tan Asin Acos Atan Sinh "
    "Cosh Asinh Acosh Atanh Cast LogicalNot StopGradient PreventGradient IsFinite IsNan IsInf ZerosLike OnesLike "
    "LeakyRelu Softmax LogSoftmax BiasAdd Cumsum Cumprod ReverseV2 Snapshot CheckNumerics Ndtri BesselI0e BesselI1e "
    "Invert Conj StringLower StringUpper StringStrip StringLength AsString StringToNumber StringToHashBucket "
    "StringToHashBucketFast StringToHashBucketStrong StaticRegexReplace StaticRegexFullMatch RegexReplace "
    "RegexFullMatch DecodeBase64 EncodeBase64 UnicodeTranscode UnicodeScript Bucketize RandomShuffle ReverseSequence "
    "MatrixBandPart"
)
extents(*SAME.split())(_first_input)


@extents("IdentityN")
def _identity_n(known: Extents, node: Node) -> list[Dims | None]:
    return [known.dims(each) for each in node.inputs]


BROADCASTING = (
    "Add AddV2 Sub Mul RealDiv Div DivNoNan Maximum Minimum Pow SquaredDifference Greater GreaterEqual Less LessEqual "
    "Equal NotEqual LogicalAnd LogicalOr FloorDiv FloorMod Mod TruncateDiv TruncateMod Xdivy Xlogy Xlog1py MulNoNan "
    "Atan2 ReluGrad Relu6Grad TanhGrad SigmoidGrad SqrtGrad RsqrtGrad EluGrad SeluGrad SoftplusGrad SoftsignGrad "
    "LeakyReluGrad InvGrad ReciprocalGrad SelectV2 AddN BitwiseAnd BitwiseOr BitwiseXor LeftShift RightShift "
    "StringJoin Substr ApproximateEqual NextAfter Igamma Igammac Zeta Polygamma Betainc ClipByValue"
)


@extents(*BROADCASTING.split())
def _broadcast(known: Extents, node: Node) -> list[Any]:
    return [broadcast([known.dims(each) for each in node.inputs])]


@extents("Reshape")
def _reshape(known: Extents, node: Node) -> list[Any]:
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
def _expand_dims(known: Extents, node: Node) -> list[Any]:
    dims, axis = known.dims(node.inputs[0]), known.number(node.inputs[1])
    if dims is None or axis is None or axis.number is None:
        return [None]
    at = axis.number % (len(dims) + 1)
    return [(*dims[:at], ONE, *dims[at:])]


@extents("Squeeze")
def _squeeze(known: Extents, node: Node) -> list[Any]:
    dims = known.dims(node.inputs[0])
    if dims is None:
        return [None]
    axes = [axis % len(dims) for axis in node.attr("squeeze_dims")]
    if not axes:
        if any(each.number is None for each in dims):
            return [None]
        axes = [axis for axis, each in enumerate(dims) if each == 1]
    return [tuple(each for axis, each in enumerate(dims) if axis not in axes)]


@extents("Transpose")
def _transpose(known: Extents, node: Node) -> list[Any]:
    dims, order = known.dims(node.inputs[0]), known.constants(node.inputs[1])
    return [None if dims is None or order is None else [dims[axis] for axis in order]]


@extents("Sum", "Mean", "Max", "Min", "Prod", "All", "Any", "EuclideanNorm")
def _reduce(known: Extents, node: Node) -> list[Any]:
    dims, axes = known.dims(node.inputs[0]), reduced_axes(known, node.inputs[1])
    if dims is None or axes is None or axes[1] and not node.attr("keep_dims"):
        return [None]
    gone = {axis % max(len(dims), 1) for axis in axes[0]}
    if node.attr("keep_dims"):
        return [[ONE if axis in gone else each for axis, each in enumerate(dims)]]
    return [[each for axis, each in enumerate(dims) if axis not in gone]]


@extents("ArgMax", "ArgMin")
def _arg_max(known: Extents, node: Node) -> list[Any]:
    dims, axis = known.dims(node.inputs[0]), known.number(node.inputs[1])
    if dims is None or axis is None or axis.number is None:
        return [None]
    return [[each for at, each in enumerate(dims) if at != axis.number % len(dims)]]


@extents("MatMul")
def _matmul(known: Extents, node: Node) -> list[Any]:
    a, b = (known.dims(each) for each in node.inputs)
    if a is None or b is None:
        return [None]
    return [[a[1 if node.attr("transpose_a") else 0], b[0 if node.attr("transpose_b") else 1]]]


@extents("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3")
def _batch_matmul(known: Extents, node: Node) -> list[Any]:
    a, b = (known.dims(each) for each in node.inputs)
    if a is None or b is None:
        return [None]
    front = broadcast([a[:-2], b[:-2]])
    return [[*front, a[-1 if node.attr("adj_x") else -2], b[-2 if node.attr("adj_y") else -1]]]


@extents("Fill", "BroadcastTo")
def _filled(known: Extents, node: Node) -> list[Any]:
    shape = known.numbers(node.inputs[0 if node.type == "Fill" else 1])
    return [None if shape is None or any(each == -1 for each in shape.entries) else shape.entries]


@extents("Pack")
def _packed(known: Extents, node: Node) -> list[Any]:
    dims = known.dims(node.inputs[0])
    if dims is None:
        return [None]
    axis = node.attr("axis") % (len(dims) + 1)
    return [(*dims[:axis], Dim(len(node.inputs)), *dims[axis:])]


@extents("Unpack")
def _unpacked(known: Extents, node: Node) -> list[Any]:
    dims = known.dims(node.inputs[0])
    if dims is None:
        return [None] * len(node.outputs)
    axis = node.attr("axis") % len(dims)
    return [(*dims[:axis], *dims[axis + 1 :])] * len(node.outputs)


@extents("ConcatV2")
def _concatenated(known: Extents, node: Node) -> list[Any]:
    parts, axis = [known.dims(each) for each in node.inputs[:-1]], known.number(node.inputs[-1])
    if any(each is None for each in parts) or axis is None or axis.number is None or not parts[0]:
        return [None]
    at = axis.number % len(parts[0])
    total = parts[0][at]
    for each in parts[1:]:
        total = total + each[at]
    return [[total if a == at else each for a, each in enumerate(parts[0])]]


@extents("GatherV2", "ResourceGather")
def _gathered(known: Extents, node: Node) -> list[Any]:
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
def _counted_entries(known: Extents, node: Node) -> list[Any]:
    dims, size = known.dims(node.inputs[0]), known.number(node.inputs[1])
    return [None if dims is None or not dims else (*dims[:-1], size)]


@extents("LookupTableFindV2")
def _found(known: Extents, node: Node) -> list[Any]:
    return [known.dims(node.inputs[1]) if finds_for_each_key(node) else None]


def _tail(front: Dims, output: Value) -> list[Dim | None]:
    rest = output.shape.as_list()[len(front) :]
    return [*front, *(None if each is None else Dim(each) for each in rest)]


@extents("OneHot")
def _one_hot(known: Extents, node: Node) -> list[Any]:
    dims, depth = known.dims(node.inputs[0]), known.number(node.inputs[1])
    if dims is None:
        return [None]
    axis = node.attr("axis") % (len(dims) + 1)
    return [(*dims[:axis], depth, *dims[axis:])]


@extents("SparseSoftmaxCrossEntropyWithLogits", "SoftmaxCrossEntropyWithLogits")
def _cross_entropy(known: Extents, node: Node) -> list[Any]:
    dims = known.dims(node.inputs[0])
    return [None if dims is None else dims[:1], dims]


@extents("ImageProjectiveTransformV2", "ImageProjectiveTransformV3")
def _transformed(known: Extents, node: Node) -> list[Any]:
    dims, size = known.dims(node.inputs[0]), known.numbers(node.inputs[2])
    if dims is None or size is None or len(size.entries) != 2:
        return [None]
    return [(dims[0], *(each if each.is_extent else None for each in size.entries), dims[3])]


@extents("Range")
def _range(known: Extents, node: Node) -> list[Any]:
    start, limit, step = (known.number(each) if each.dtype.is_integer else None for each in node.inputs)
    if start != 0 or step != 1 or limit is None:
        return [None]
    return [[limit] if limit.is_extent else None]


@extents("Tile")
def _tiled(known: Extents, node: Node) -> list[Any]:
    dims, times = known.dims(node.inputs[0]), known.numbers(node.inputs[1])
    return [None if dims is None or times is None else [a * b for a, b in zip(dims, times.entries)]]


_FROM_SHAPE = (
    "RandomStandardNormal RandomUniform RandomUniformInt TruncatedNormal StatelessRandomUniformV2 "
    "StatelessRandomNormalV2 StatelessTruncatedNormalV2 StatelessRandomUniformFullIntV2 StatelessRandomUniformIntV2 "
    "StatelessRandomUniform StatelessRandomNormal StatelessTruncatedNormal StatelessRandomUniformInt Empty"
)


@extents(*_FROM_SHAPE.split())
def _drawn(known: Extents, node: Node) -> list[Any]:
    shape = known.numbers(node.inputs[0])
    return [None if shape is None else shape.entries]


@extents("UnsortedSegmentSum", "UnsortedSegmentMax", "UnsortedSegmentMin", "UnsortedSegmentProd")
def _segments(known: Extents, node: Node) -> list[Any]:
    data, ids, count = known.dims(node.inputs[0]), known.dims(node.inputs[1]), known.number(node.inputs[2])
    return [None if data is None or ids is None else (count, *data[len(ids) :])]
