"""Parts of tensors and tensors made of parts: slices, concatenation, splits, padding."""

from __future__ import annotations

from typing import Any

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.context import Context
from keras_ddl.cut.dims import Dim
from keras_ddl.cut.placements import PARTIAL, Partial, Replicated, Sharded
from keras_ddl.cut.program import Node
from keras_ddl.cut.registry import rule


def _all_whole(b: Context, values: Any) -> bool:
    return all(isinstance(b.placement(each), Replicated) for each in values)


def _int64(vector: Any) -> tf.Tensor:
    """Of two vectors one may be known when the step is traced and the other not: of one type all the same."""
    return tf.cast(vector, tf.int64)


@rule("StridedSlice")
def strided_slice(b: Context, node: Node) -> Any:
    value = node.inputs[0]
    placement, dims = b.placement(value), b.dims(value)
    if not isinstance(placement, Sharded) or dims is None or not _all_whole(b, node.inputs[1:]):
        return None
    begin, end, strides = (b.extents.numbers(each) for each in node.inputs[1:])
    if begin is None or end is None or strides is None:
        return None
    spec = Specification(node, len(begin.entries), len(dims))
    place = spec.place_of(placement.axis)
    if place is None:  # beyond what is named: taken as it is
        taken, out_axis = True, spec.output_axis(placement.axis)
    else:
        first, last, step = begin.entries[place], end.entries[place], strides.entries[place]
        if node.attr("shrink_axis_mask") >> place & 1 or step != 1:
            return None
        starts = node.attr("begin_mask") >> place & 1 or first == 0
        ends = node.attr("end_mask") >> place & 1 or last == dims[placement.axis]
        taken, out_axis = bool(starts and ends), spec.output_axis(placement.axis)
    if not taken:
        return _some_blocks(b, node, placement, spec, begin, end)
    masks = {} if place is None else {"begin_mask": 1 << place, "end_mask": 1 << place}
    new = {name: _int(node.attr(name) | bit) for name, bit in masks.items()}
    made = b.make(node, [b.local(value), *map(b.replicated, node.inputs[1:])], **new)[0]
    return [(made, placement.at(out_axis))]


def _some_blocks(b: Context, node: Node, placement: Sharded, spec: Any, begin: Any, end: Any) -> Any:
    """x[:n], x[n:] of two batches one after the other."""
    place = spec.place_of(placement.axis)
    one_block = b.rows * placement.unit
    first = Dim(0) if node.attr("begin_mask") >> place & 1 else begin.entries[place].divided_by(one_block)
    last = placement.blocks if node.attr("end_mask") >> place & 1 else end.entries[place].divided_by(one_block)
    if first is None or last is None or None in (first.number, last.number, placement.blocks.number):
        return None
    first, last, blocks = first.number, last.number, placement.blocks.number
    if not 0 <= first < last <= blocks:
        return None
    value = node.inputs[0]
    width = b.local_extent(Sharded(placement.axis, Dim(1), placement.unit))
    rank = len(b.dims(value))
    start, size = [0] * rank, [-1] * rank
    start[placement.axis], size[placement.axis] = first * width, (last - first) * width
    part = tf.slice(b.local(value), b.vector(start, tf.int64), b.vector(size, tf.int64))
    masks = {name: _int(node.attr(name) | 1 << place) for name in ("begin_mask", "end_mask")}
    made = b.make(node, [part, *map(b.replicated, node.inputs[1:])], **masks)[0]
    return [(made, Sharded(spec.output_axis(placement.axis), Dim(last - first), placement.unit))]


class Specification:
    """Which entry of a StridedSlice's vectors speaks of which axis."""

    def __init__(self, node: Node, entries: int, rank: int) -> None:
        ellipsis, new, shrink = (node.attr(f"{name}_mask") for name in ("ellipsis", "new_axis", "shrink_axis"))
        self._places: dict[int, int] = {}
        self._outputs: dict[int, int] = {}
        named = sum(1 for i in range(entries) if not (ellipsis >> i & 1 or new >> i & 1 and not ellipsis >> i & 1))
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

    def place_of(self, axis: int) -> int | None:
        return self._places.get(axis)

    def output_axis(self, axis: int) -> int:
        return self._outputs[axis]


def _int(value: int) -> Any:
    return tf.compat.v1.AttrValue(i=value)


@rule("StridedSliceGrad")
def strided_slice_grad(b: Context, node: Node) -> Any:
    shape, begin, end, strides, gradient = node.inputs
    placement, dims = b.placement(gradient), b.extents.numbers(shape)
    if dims is None or not _all_whole(b, node.inputs[:4]):
        return None
    if placement == PARTIAL:
        return [(b.make(node, [*map(b.replicated, node.inputs[:4]), b.local(gradient)])[0], PARTIAL)]
    if not isinstance(placement, Sharded):
        return None
    vectors = [b.extents.numbers(each) for each in (begin, end, strides)]
    if any(each is None for each in vectors):
        return None
    spec = Specification(node, len(vectors[0].entries), len(dims.entries))
    axes = [a for a in range(len(dims.entries)) if spec.output_axis(a) == placement.axis and not _shrunk(node, spec, a)]
    axis = axes[0] if axes else None
    if axis is None or dims.entries[axis] != b.extent(placement):
        return None  # rows that were a part of the axis
    rows, place = placement.at(axis), spec.place_of(axis)
    masks = {}
    if place is not None:
        if vectors[2].entries[place] != 1:
            return None
        masks = {name: _int(node.attr(name) | 1 << place) for name in ("begin_mask", "end_mask")}
    local = b.local_shape(dims.entries, rows, shape.dtype)
    return [(b.make(node, [local, *map(b.replicated, node.inputs[1:4]), b.local(gradient)], **masks)[0], rows)]


def _shrunk(node: Node, spec: Specification, axis: int) -> bool:
    place = spec.place_of(axis)
    return place is not None and bool(node.attr("shrink_axis_mask") >> place & 1)


@rule("Slice")
def slice_(b: Context, node: Node) -> Any:
    value = node.inputs[0]
    placement, dims = b.placement(value), b.dims(value)
    begin, size = (b.extents.numbers(each) for each in node.inputs[1:])
    if dims is None or begin is None or size is None or not _all_whole(b, node.inputs[1:]):
        return None
    if isinstance(placement, Partial):
        return [(b.make(node, [b.local(value), *map(b.replicated, node.inputs[1:])])[0], placement)]
    axis = placement.axis
    if begin.entries[axis] != 0 or size.entries[axis] not in (Dim(-1), dims[axis]):
        return None
    sizes = [Dim(-1) if i == axis else each for i, each in enumerate(size.entries)]
    made = tf.slice(b.local(value), b.vector(begin.entries, tf.int64), b.vector(sizes, tf.int64))
    return [(made, placement)]


@rule("ConcatV2")
def concat(b: Context, node: Node) -> Any:
    parts, axis = list(node.inputs[:-1]), b.constants(node.inputs[-1])
    placements = [b.placement(each) for each in parts]
    dims = [b.dims(each) for each in parts]
    if axis is None or any(each is None for each in dims):
        return None
    at = axis[0] % len(dims[0])
    if all(each == PARTIAL for each in placements):
        return [(b.make(node, [*map(b.local, parts), b.replicated(node.inputs[-1])])[0], PARTIAL)]
    rows = next((each for each in placements if isinstance(each, Sharded)), None)
    if rows is None:
        return None
    if rows.axis != at:
        if any(not b.can_shard(each, rows) for each in parts):
            return None
        b.all_replicated([each for each, placement in zip(parts, placements) if isinstance(placement, Partial)])
        return [(b.make(node, [*(b.sharded(each, rows) for each in parts), b.replicated(node.inputs[-1])])[0], rows)]
    return _one_after_the_other(b, node, parts, dims, rows, at)


def _one_after_the_other(b: Context, node: Node, parts: Any, dims: Any, rows: Sharded, at: int) -> Any:
    """Batches one after the other: blocks of the same unit."""
    cuts = []
    for value, shape in zip(parts, dims):
        placement = b.placement(value)
        if isinstance(placement, Sharded) and placement.axis == at and placement.unit == rows.unit:
            cuts.append(placement)
            continue
        blocks = shape[at].divided_by(b.rows * rows.unit)
        if blocks is None or blocks.number == 0:
            return None
        cuts.append(Sharded(at, blocks, rows.unit))
    total = Dim(0)
    for each in cuts:
        total = total + each.blocks
    b.all_replicated([each for each in parts if isinstance(b.placement(each), Partial)])
    made = b.make(node, [*(b.sharded(each, cut) for each, cut in zip(parts, cuts)), b.replicated(node.inputs[-1])])[0]
    return [(made, Sharded(at, total, rows.unit))]


@rule("Split", "SplitV")
def split(b: Context, node: Node) -> Any:
    value = node.inputs[1 if node.type == "Split" else 0]
    given = b.constants(node.inputs[0 if node.type == "Split" else 2])
    placement, dims = b.placement(value), b.dims(value)
    others = [each for each in node.inputs if each is not value]
    if given is None or dims is None or not _all_whole(b, others):
        return None
    axis = given[0] % len(dims)
    if not isinstance(placement, Sharded):
        return [(each, placement) for each in b.make(node, [b.local(e) for e in node.inputs])]
    if axis != placement.axis:
        return [(each, placement) for each in b.make(node, [b.local(e) for e in node.inputs])]
    count = len(node.outputs)
    blocks = placement.blocks.number
    if node.type == "SplitV":
        sizes = b.extents.numbers(node.inputs[1])
        if sizes is None or len({*sizes.entries}) != 1 or sizes.entries[0] * count != dims[axis]:
            return None
    if blocks is None or blocks % count:
        return None
    placed = tf.split(b.local(value), count, axis)
    return [(each, Sharded(axis, Dim(blocks // count), placement.unit)) for each in placed]


@rule("Tile")
def tile(b: Context, node: Node) -> Any:
    value, times = node.inputs[0], b.extents.numbers(node.inputs[1])
    placement = b.placement(value)
    if times is None or not isinstance(b.placement(node.inputs[1]), Replicated):
        return None
    if not isinstance(placement, Sharded) or times.entries[placement.axis].factor < 1:
        return None
    made = b.make(node, [b.local(value), b.replicated(node.inputs[1])])[0]
    # The whole batch n times, one after the other.
    return [(made, Sharded(placement.axis, placement.blocks * times.entries[placement.axis], placement.unit))]
