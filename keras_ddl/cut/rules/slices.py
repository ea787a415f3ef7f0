"""Rules for parts of tensors: slices, concatenation, splits, repetition."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.analysis.attributes import AttrValue
from keras_ddl.cut.analysis.dims import Dim, Uncertain, certain, total
from keras_ddl.cut.analysis.extents import Dims, Extents, ResultExtents, ResultNumbers, extents, numbers
from keras_ddl.cut.analysis.placements import PARTIAL, REPLICATED, Partial, PlacedOutputs, Sharded
from keras_ddl.cut.analysis.program import Node, Value
from keras_ddl.cut.operations.context import Context
from keras_ddl.cut.operations.registry import rule
from keras_ddl.cut.values import redistribute

_MOST_SEGMENTS = 128  # batches in a sequence that are compared one by one


def _are_replicated(b: Context, values: Sequence[Value]) -> bool:
    return all(b.placement(each) == REPLICATED for each in values)


class Specification:
    """The vectors of a StridedSlice: they say which entry specifies which axis of an operand with `rank` axes."""

    def __init__(self, node: Node, vectors: Sequence[Dims], rank: int) -> None:
        self._node = node
        self.begin, self.end, self.strides = vectors
        entries = len(self.begin)
        ellipsis, new, shrink = (self._mask(each) for each in ("ellipsis", "new_axis", "shrink_axis"))
        if not ellipsis:  # there is one after the last entry
            ellipsis, entries = 1 << entries, entries + 1
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

    def _mask(self, name: str) -> int:
        return self._node.attr(f"{name}_mask", int)

    def has(self, mask: str, place: int | None) -> bool:
        """Whether a mask is set for an entry."""
        return place is not None and bool(self._mask(mask) >> place & 1)

    def place_of(self, axis: int) -> int | None:
        """Returns which entry specifies an axis; None: the axis is taken in full."""
        return self._places.get(axis)

    def output_axis(self, axis: int) -> int:
        return self._outputs[axis]

    def taking_all(self, place: int | None) -> dict[str, AttrValue]:
        """Returns the attributes that take all of a rank's entries along an axis."""
        if place is None:
            return {}
        names = ("begin_mask", "end_mask")
        return {name: tf.compat.v1.AttrValue(i=self._node.attr(name, int) | 1 << place) for name in names}


@rule("StridedSlice")
def strided_slice(b: Context, node: Node) -> PlacedOutputs | None:
    """Builds a slice that takes everything along the sharded axis, or whole batches of several in sequence."""
    value, *operands = node.inputs
    placement = b.placement(value)
    if not isinstance(placement, Sharded) or not _are_replicated(b, operands):
        return None
    dims = b.dims(value)
    spec = Specification(node, [b.extents.numbers(each) for each in operands], len(dims))
    place = spec.place_of(placement.axis)
    tensor = b.local(value)
    if place is not None:
        if spec.has("shrink_axis", place) or spec.strides[place] != 1:
            return None
        starts = spec.has("begin", place) or spec.begin[place] == 0
        ends = spec.has("end", place) or spec.end[place] == dims[placement.axis]
        if not (starts and ends):  # e.g. x[:n] or x[n:] of two concatenated batches
            segments = certain(placement.segments)
            if len(segments) > _MOST_SEGMENTS:
                return None
            edges = [_edge(b, placement, segments[:count]) for count in range(len(segments) + 1)]
            first = 0 if starts else certain(_place_in(edges, spec.begin[place]))
            last = len(segments) if ends else certain(_place_in(edges, spec.end[place]))
            if not first < last:
                return None
            tensor = _segments(b, tensor, placement, segments, first, last)
            placement = placement.of_segments(segments[first:last])
    made = b.make(node, [tensor, *map(b.replicated, operands)], **spec.taking_all(place))[0]
    return [(made, placement.at(spec.output_axis(placement.axis)))]


def _edge(b: Context, placement: Sharded, segments: Sequence[int]) -> Dim:
    """Returns where these segments end, along the sharded axis of the global tensor."""
    return total([b.rows_of_batches[each] for each in segments]) * placement.unit if segments else Dim(0)


def _place_in(edges: Sequence[Dim], place: Dim) -> int | None:
    return edges.index(place) if place in edges else None


def _segments(
    b: Context, tensor: tf.Tensor, placement: Sharded, segments: Sequence[int], first: int, last: int
) -> tf.Tensor:
    """Returns some of the segments of a shard."""
    rows = [b.times(b.batches[each].local, b.number(placement.unit)) for each in segments]
    return redistribute.rows(b, tensor, placement.axis, b.total([0, *rows[:first]]), b.total(rows[first:last]))


@rule("StridedSliceGrad")
def strided_slice_grad(b: Context, node: Node) -> PlacedOutputs | None:
    *operands, gradient = node.inputs
    placement, shape = b.placement(gradient), b.extents.numbers(operands[0])
    if not _are_replicated(b, operands):
        return None
    if placement == PARTIAL:
        return [(b.make(node, [*map(b.replicated, operands), b.local(gradient)])[0], PARTIAL)]
    if not isinstance(placement, Sharded):
        return None
    spec = Specification(node, [b.extents.numbers(each) for each in operands[1:]], len(shape))
    for axis, extent in enumerate(shape):
        place = spec.place_of(axis)
        if spec.output_axis(axis) != placement.axis or spec.has("shrink_axis", place):
            continue
        if extent != b.extent(placement) or place is not None and spec.strides[place] != 1:
            return None  # the rows were only a part of the axis
        result = placement.at(axis)
        local = b.local_shape(shape, result, operands[0].dtype)
        tensors = [local, *map(b.replicated, operands[1:]), b.local(gradient)]
        return [(b.make(node, tensors, **spec.taking_all(place))[0], result)]
    return None


@numbers("StridedSlice")
def _strided_slice_numbers(known: Extents, node: Node) -> ResultNumbers:
    operand = known.vector(node.inputs[0])
    if node.attr("new_axis_mask", int) or node.attr("ellipsis_mask", int):
        raise Uncertain
    begin, stride = known.constants(node.inputs[1]), known.constants(node.inputs[3])
    if len(begin) != 1:
        raise Uncertain
    if node.attr("shrink_axis_mask", int):
        if not -len(operand) <= begin[0] < len(operand):
            raise Uncertain
        return [[operand[begin[0]]]]
    first = None if node.attr("begin_mask", int) else begin[0]
    last = None if node.attr("end_mask", int) else known.constants(node.inputs[2])[0]
    return [operand[slice(first, last, stride[0])]]


@rule("Slice")
def slice_(b: Context, node: Node) -> PlacedOutputs | None:
    value, *operands = node.inputs
    placement = b.placement(value)
    begin, size = map(b.extents.numbers, operands)
    if not _are_replicated(b, operands):
        return None
    if isinstance(placement, Partial):
        return [(b.make(node, [b.local(value), *map(b.replicated, operands)])[0], placement)]
    if not isinstance(placement, Sharded):
        return None
    axis = placement.axis
    if begin[axis] != 0 or size[axis] not in (Dim(-1), b.dims(value)[axis]):
        return None
    sizes = [Dim(-1) if i == axis else each for i, each in enumerate(size)]
    return [(tf.slice(b.local(value), b.vector(begin, tf.int64), b.vector(sizes, tf.int64)), placement)]


@numbers("Slice")
def _slice_numbers(known: Extents, node: Node) -> ResultNumbers:
    operand, begin, size = known.vector(node.inputs[0]), *map(known.constants, node.inputs[1:])
    end = len(operand) if size[0] == -1 else begin[0] + size[0]
    return [operand[begin[0] : end]]


@rule("ConcatV2")
def concat(b: Context, node: Node) -> PlacedOutputs | None:
    *parts, along = node.inputs
    placements = [b.placement(each) for each in parts]
    at = b.extents.constants(along)[0] % len(b.dims(parts[0]))
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
        shards = [_as_blocks(b, each, first) for each in parts]
        result = _one_after_another(shards)
    b.all_replicated([each for each, placement in zip(parts, placements) if isinstance(placement, Partial)])
    tensors = [b.redistributed(each, shard) for each, shard in zip(parts, shards)]
    return [(b.make(node, [*tensors, b.replicated(along)])[0], result)]


def _as_blocks(b: Context, value: Value, other: Sharded) -> Sharded:
    """Returns how a value that is concatenated with another is sharded: as a sequence of batches."""
    placement = b.placement(value)
    if isinstance(placement, Sharded) and (placement.axis, placement.unit) == (other.axis, other.unit):
        return placement
    blocks = certain(b.dims(value)[other.axis].divided_by(b.rows_of(other) * other.unit))
    if blocks == 0:
        raise Uncertain
    return replace(other, blocks=blocks)


def _one_after_another(shards: Sequence[Sharded]) -> Sharded:
    """Returns how a tensor that consists of these tensors along the sharded axis is sharded."""
    first = shards[0]
    if all(each.rows == first.rows for each in shards):
        return replace(first, blocks=total([each.blocks for each in shards]))
    segments = [number for each in shards for number in certain(each.segments)]
    if len(segments) > _MOST_SEGMENTS:
        raise Uncertain
    return first.of_segments(segments)


@extents("ConcatV2")
def _concat_extents(known: Extents, node: Node) -> ResultExtents:
    parts, (axis,) = [known.dims(each) for each in node.inputs[:-1]], known.constants(node.inputs[-1])
    if not parts[0]:
        raise Uncertain
    at = axis % len(parts[0])
    extent = total([each[at] for each in parts])
    return [[extent if a == at else each for a, each in enumerate(parts[0])]]


@numbers("ConcatV2")
def _concat_numbers(known: Extents, node: Node) -> ResultNumbers:
    return [[entry for part in node.inputs[:-1] for entry in known.numbers(part)]]


@rule("Split", "SplitV")
def split(b: Context, node: Node) -> PlacedOutputs | None:
    value = node.inputs[1 if node.type == "Split" else 0]
    along = b.extents.constants(node.inputs[0 if node.type == "Split" else 2])
    placement, dims = b.placement(value), b.dims(value)
    if not _are_replicated(b, [each for each in node.inputs if each is not value]):
        return None
    axis = along[0] % len(dims)
    if not isinstance(placement, Sharded) or axis != placement.axis:
        return [(each, placement) for each in b.make(node, [b.local(each) for each in node.inputs])]
    count, blocks = len(node.outputs), placement.blocks.number
    if node.type == "SplitV":
        sizes = b.extents.numbers(node.inputs[1])
        if len({*sizes}) != 1 or sizes[0] * count != dims[axis]:
            return None
    if blocks is None or blocks % count:
        return None
    result = replace(placement, blocks=Dim(blocks // count))
    return [(each, result) for each in tf.split(b.local(value), count, axis)]


@rule("Tile")
def tile(b: Context, node: Node) -> PlacedOutputs | None:
    """Repeats the global batch n times in sequence."""
    value = node.inputs[0]
    placement = b.placement(value)
    if not isinstance(placement, Sharded) or not _are_replicated(b, node.inputs[1:]):
        return None
    repeated = b.extents.numbers(node.inputs[1])[placement.axis]
    if repeated.factor < 1:
        return None
    made = b.make(node, [b.local(value), b.replicated(node.inputs[1])])[0]
    return [(made, replace(placement, blocks=placement.blocks * repeated))]


@rule("SpaceToBatchND", "BatchToSpaceND")
def space_and_batch(b: Context, node: Node) -> PlacedOutputs | None:
    """Turns a dilated convolution into a plain one: axis 0 holds the batch once per position in a block of space."""
    value, block = node.inputs[:2]
    placement = b.placement(value)
    if not isinstance(placement, Sharded) or placement.axis or not _are_replicated(b, node.inputs[1:]):
        return None
    places = math.prod(b.extents.constants(block))
    blocks = placement.blocks
    blocks = blocks * places if node.type == "SpaceToBatchND" else certain(blocks.divided_by(places))
    made = b.make(node, [b.local(value), *map(b.replicated, node.inputs[1:])])[0]
    return [(made, replace(placement, blocks=blocks))]


@extents("Tile")
def _tile_extents(known: Extents, node: Node) -> ResultExtents:
    return [[a * b for a, b in zip(known.dims(node.inputs[0]), known.numbers(node.inputs[1]))]]
