"""Parts of tensors and tensors made of parts: slices, concatenation, splits, repetition."""

from __future__ import annotations

import math
from collections.abc import Sequence

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.attributes import AttrValue
from keras_ddl.cut.context import Context
from keras_ddl.cut.dims import Dim, complete, total
from keras_ddl.cut.extents import Dims, Extents, Numbers, ResultExtents, extents, numbers
from keras_ddl.cut.local_shapes import Scalar
from keras_ddl.cut.placements import PARTIAL, Made, Partial, Replicated, Sharded
from keras_ddl.cut.program import Node, Value
from keras_ddl.cut.registry import rule


def _are_replicated(b: Context, values: Sequence[Value]) -> bool:
    return all(isinstance(b.placement(each), Replicated) for each in values)


class Specification:
    """The vectors of a StridedSlice: which of their entries specifies which axis of an operand of `rank` axes."""

    def __init__(self, node: Node, vectors: Sequence[Numbers | None], rank: int) -> None:
        self._node = node
        self.begin, self.end, self.strides = (None if each is None else each.entries for each in vectors)
        entries = len(self.begin or ())
        ellipsis, new, shrink = (self._mask(each) for each in ("ellipsis", "new_axis", "shrink_axis"))
        self._places: dict[int, int] = {}
        self._outputs: dict[int, int] = {}
        named = sum(1 for i in range(entries) if not (ellipsis >> i & 1 or new >> i & 1))
        axis = out = 0
        for i in range(entries):
            if ellipsis >> i & 1:
                for _ in range(rank - named):
                    self._outputs[axis] = out
                    axis, out = axis + 1, out + 1
            elif new >> i & 1:
                out += 1
            else:
                self._places[axis] = i
                self._outputs[axis] = out
                axis, out = axis + 1, out + (0 if shrink >> i & 1 else 1)
        while axis < rank:
            self._outputs[axis] = out
            axis, out = axis + 1, out + 1

    def _mask(self, name: str) -> int:
        return self._node.attr(f"{name}_mask", int)

    def has(self, mask: str, place: int | None) -> bool:
        """Whether a mask is set for an entry."""
        return place is not None and bool(self._mask(mask) >> place & 1)

    def place_of(self, axis: int) -> int | None:
        """Returns which entry specifies an axis; None: it is taken as it is."""
        return self._places.get(axis)

    def output_axis(self, axis: int) -> int:
        return self._outputs[axis]

    def taking_all(self, place: int | None) -> dict[str, AttrValue]:
        """Returns the attributes with which all of a rank's entries along an axis are taken."""
        if place is None:
            return {}
        names = ("begin_mask", "end_mask")
        return {name: tf.compat.v1.AttrValue(i=self._node.attr(name, int) | 1 << place) for name in names}


@rule("StridedSlice")
def strided_slice(b: Context, node: Node) -> Made | None:
    value, *operands = node.inputs
    placement, dims = b.placement(value), b.dims(value)
    if not isinstance(placement, Sharded) or dims is None or not _are_replicated(b, operands):
        return None
    spec = Specification(node, [b.extents.numbers(each) for each in operands], len(dims))
    if spec.begin is None or spec.end is None or spec.strides is None:
        return None
    place = spec.place_of(placement.axis)
    tensor, blocks = b.local(value), placement.blocks
    if place is not None:
        if spec.has("shrink_axis", place) or spec.strides[place] != 1:
            return None
        one_block = b.rows * placement.unit
        starts = spec.has("begin", place) or spec.begin[place] == 0
        ends = spec.has("end", place) or spec.end[place] == dims[placement.axis]
        if not (starts and ends):  # x[:n], x[n:] of two batches one after the other
            first = Dim(0) if starts else spec.begin[place].divided_by(one_block)
            last = blocks if ends else spec.end[place].divided_by(one_block)
            taken = complete(None if each is None else each.number for each in (first, last, blocks))
            if taken is None or not 0 <= taken[0] < taken[1] <= taken[2]:
                return None
            tensor = _blocks(b, tensor, placement, taken[0], taken[1])
            blocks = Dim(taken[1] - taken[0])
    made = b.make(node, [tensor, *map(b.replicated, operands)], **spec.taking_all(place))[0]
    return [(made, Sharded(spec.output_axis(placement.axis), blocks, placement.unit))]


def _blocks(b: Context, tensor: tf.Tensor, placement: Sharded, first: int, last: int) -> tf.Tensor:
    """Returns some of the blocks of a shard."""
    width, rank = b.local_extent(Sharded(placement.axis, Dim(1), placement.unit)), tensor.shape.rank
    begin: list[Scalar] = [0] * rank
    size: list[Scalar] = [-1] * rank
    begin[placement.axis], size[placement.axis] = first * width, (last - first) * width
    return tf.slice(tensor, b.vector(begin, tf.int64), b.vector(size, tf.int64))


@rule("StridedSliceGrad")
def strided_slice_grad(b: Context, node: Node) -> Made | None:
    *operands, gradient = node.inputs
    placement, shape = b.placement(gradient), b.extents.numbers(operands[0])
    if shape is None or not _are_replicated(b, operands):
        return None
    if placement == PARTIAL:
        return [(b.make(node, [*map(b.replicated, operands), b.local(gradient)])[0], PARTIAL)]
    spec = Specification(node, [b.extents.numbers(each) for each in operands[1:]], len(shape.entries))
    if not isinstance(placement, Sharded) or spec.begin is None or spec.end is None or spec.strides is None:
        return None
    for axis, extent in enumerate(shape.entries):
        place = spec.place_of(axis)
        if spec.output_axis(axis) != placement.axis or spec.has("shrink_axis", place):
            continue
        if extent != b.extent(placement) or place is not None and spec.strides[place] != 1:
            return None  # rows that were a part of the axis
        result = placement.at(axis)
        local = b.local_shape(shape.entries, result, operands[0].dtype)
        tensors = [local, *map(b.replicated, operands[1:]), b.local(gradient)]
        return [(b.make(node, tensors, **spec.taking_all(place))[0], result)]
    return None


@numbers("StridedSlice")
def _strided_slice_numbers(known: Extents, node: Node) -> Numbers | None:
    operand = known.numbers(node.inputs[0])
    if operand is None or operand.is_scalar or node.attr("new_axis_mask", int) or node.attr("ellipsis_mask", int):
        return None
    begin, end, stride = (known.constants(each) for each in node.inputs[1:])
    if begin is None or stride is None or len(begin) != 1:
        return None
    if node.attr("shrink_axis_mask", int):
        at = begin[0]
        return Numbers([operand.entries[at]], True) if -len(operand.entries) <= at < len(operand.entries) else None
    takes_all = node.attr("end_mask", int)
    if end is None and not takes_all:
        return None
    first = None if node.attr("begin_mask", int) else begin[0]
    last = None if takes_all or end is None else end[0]
    return Numbers(operand.entries[slice(first, last, stride[0])])


@rule("Slice")
def slice_(b: Context, node: Node) -> Made | None:
    value, *operands = node.inputs
    placement, dims = b.placement(value), b.dims(value)
    begin, size = (b.extents.numbers(each) for each in operands)
    if dims is None or begin is None or size is None or not _are_replicated(b, operands):
        return None
    if isinstance(placement, Partial):
        return [(b.make(node, [b.local(value), *map(b.replicated, operands)])[0], placement)]
    if not isinstance(placement, Sharded):
        return None
    axis = placement.axis
    if begin.entries[axis] != 0 or size.entries[axis] not in (Dim(-1), dims[axis]):
        return None
    sizes = [Dim(-1) if i == axis else each for i, each in enumerate(size.entries)]
    return [(tf.slice(b.local(value), b.vector(begin.entries, tf.int64), b.vector(sizes, tf.int64)), placement)]


@numbers("Slice")
def _slice_numbers(known: Extents, node: Node) -> Numbers | None:
    operand, begin, size = known.numbers(node.inputs[0]), *map(known.constants, node.inputs[1:])
    if operand is None or begin is None or size is None or operand.is_scalar:
        return None
    end = len(operand.entries) if size[0] == -1 else begin[0] + size[0]
    return Numbers(operand.entries[begin[0] : end])


@rule("ConcatV2")
def concat(b: Context, node: Node) -> Made | None:
    *parts, along = node.inputs
    placements = [b.placement(each) for each in parts]
    axis, dims = b.constants(along), complete(map(b.dims, parts))
    if axis is None or dims is None:
        return None
    at = axis[0] % len(dims[0])
    if all(each == PARTIAL for each in placements):
        return [(b.make(node, [*map(b.local, parts), b.replicated(along)])[0], PARTIAL)]
    first = next((each for each in placements if isinstance(each, Sharded)), None)
    if first is None:
        return None
    if first.axis != at:
        shards, result = [first] * len(parts), first
        if not all(b.can_shard(each, first) for each in parts):
            return None
    else:
        blocks = complete(_as_blocks(b, each, shape, first) for each, shape in zip(parts, dims))
        if blocks is None:
            return None
        shards, result = blocks, Sharded(at, total([each.blocks for each in blocks]), first.unit)
    b.all_replicated([each for each, placement in zip(parts, placements) if isinstance(placement, Partial)])
    tensors = [b.sharded(each, shard) for each, shard in zip(parts, shards)]
    return [(b.make(node, [*tensors, b.replicated(along)])[0], result)]


def _as_blocks(b: Context, value: Value, dims: Dims, other: Sharded) -> Sharded | None:
    """Returns how a value is sharded that is concatenated with another: as batches one after the other."""
    placement = b.placement(value)
    if isinstance(placement, Sharded) and (placement.axis, placement.unit) == (other.axis, other.unit):
        return placement
    blocks = dims[other.axis].divided_by(b.rows * other.unit)
    return None if blocks is None or blocks == 0 else Sharded(other.axis, blocks, other.unit)


@extents("ConcatV2")
def _concat_extents(known: Extents, node: Node) -> ResultExtents:
    parts, axis = complete(map(known.dims, node.inputs[:-1])), known.number(node.inputs[-1])
    if parts is None or axis is None or axis.number is None or not parts[0]:
        return [None]
    at = axis.number % len(parts[0])
    extent = total([each[at] for each in parts])
    return [[extent if a == at else each for a, each in enumerate(parts[0])]]


@numbers("ConcatV2")
def _concat_numbers(known: Extents, node: Node) -> Numbers | None:
    parts = complete(map(known.numbers, node.inputs[:-1]))
    return None if parts is None else Numbers([entry for each in parts for entry in each.entries])


@rule("Split", "SplitV")
def split(b: Context, node: Node) -> Made | None:
    value = node.inputs[1 if node.type == "Split" else 0]
    along = b.constants(node.inputs[0 if node.type == "Split" else 2])
    placement, dims = b.placement(value), b.dims(value)
    if along is None or dims is None or not _are_replicated(b, [each for each in node.inputs if each is not value]):
        return None
    axis = along[0] % len(dims)
    if not isinstance(placement, Sharded) or axis != placement.axis:
        return [(each, placement) for each in b.make(node, [b.local(each) for each in node.inputs])]
    count, blocks = len(node.outputs), placement.blocks.number
    if node.type == "SplitV":
        sizes = b.extents.numbers(node.inputs[1])
        if sizes is None or len({*sizes.entries}) != 1 or sizes.entries[0] * count != dims[axis]:
            return None
    if blocks is None or blocks % count:
        return None
    result = Sharded(axis, Dim(blocks // count), placement.unit)
    return [(each, result) for each in tf.split(b.local(value), count, axis)]


@rule("Tile")
def tile(b: Context, node: Node) -> Made | None:
    """The global batch n times, one after the other."""
    value, times = node.inputs[0], b.extents.numbers(node.inputs[1])
    placement = b.placement(value)
    if times is None or not isinstance(placement, Sharded) or not _are_replicated(b, node.inputs[1:]):
        return None
    repeated = times.entries[placement.axis]
    if repeated.factor < 1:
        return None
    made = b.make(node, [b.local(value), b.replicated(node.inputs[1])])[0]
    return [(made, Sharded(placement.axis, placement.blocks * repeated, placement.unit))]


@rule("SpaceToBatchND", "BatchToSpaceND")
def space_and_batch(b: Context, node: Node) -> Made | None:
    """How a dilated convolution becomes a plain one: axis 0 holds the batch once for each place in a block of space."""
    value, block = node.inputs[:2]
    placement, sizes = b.placement(value), b.constants(block)
    if not isinstance(placement, Sharded) or placement.axis or sizes is None or not _are_replicated(b, node.inputs[1:]):
        return None
    places = math.prod(sizes)
    blocks = placement.blocks * places if node.type == "SpaceToBatchND" else placement.blocks.divided_by(Dim(places))
    if blocks is None:
        return None
    made = b.make(node, [b.local(value), *map(b.replicated, node.inputs[1:])])[0]
    return [(made, Sharded(0, blocks, placement.unit))]


@extents("Tile")
def _tile_extents(known: Extents, node: Node) -> ResultExtents:
    dims, times = known.dims(node.inputs[0]), known.numbers(node.inputs[1])
    return [None if dims is None or times is None else [a * b for a, b in zip(dims, times.entries)]]
