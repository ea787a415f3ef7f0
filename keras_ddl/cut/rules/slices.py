"""Parts of tensors and tensors made of parts: slices, concatenation, splits, padding."""

from __future__ import annotations

from typing import Any

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.dims import Dim
from keras_ddl.cut.registry import rule
from keras_ddl.cut.states import PARTIAL, Partial, Rows, Whole


def _all_whole(b: Any, values: Any) -> bool:
    return all(isinstance(b.state(each), Whole) for each in values)


def _int64(vector: Any) -> tf.Tensor:
    """Of two vectors one may be known when the step is traced and the other not: of one type all the same."""
    return tf.cast(vector, tf.int64)


@rule("StridedSlice")
def strided_slice(b: Any, node: Any) -> Any:
    value = node.inputs[0]
    state, dims = b.state(value), b.dims(value)
    if not isinstance(state, Rows) or dims is None or not _all_whole(b, node.inputs[1:]):
        return None
    begin, end, strides = (b.extents.numbers(each) for each in node.inputs[1:])
    if begin is None or end is None or strides is None:
        return None
    spec = Specification(node, len(begin.entries), len(dims))
    place = spec.place_of(state.axis)
    if place is None:  # beyond what is named: taken as it is
        taken, out_axis = True, spec.output_axis(state.axis)
    else:
        first, last, step = begin.entries[place], end.entries[place], strides.entries[place]
        if node.attr("shrink_axis_mask") >> place & 1 or step != 1:
            return None
        starts = node.attr("begin_mask") >> place & 1 or first == 0
        ends = node.attr("end_mask") >> place & 1 or last == dims[state.axis]
        taken, out_axis = bool(starts and ends), spec.output_axis(state.axis)
    if not taken:
        return _some_blocks(b, node, state, spec, begin, end)
    masks = {} if place is None else {"begin_mask": 1 << place, "end_mask": 1 << place}
    new = {name: _int(node.attr(name) | bit) for name, bit in masks.items()}
    made = b.make(node, [b.held(value), *map(b.whole, node.inputs[1:])], **new)[0]
    return [(made, state.at(out_axis))]


def _some_blocks(b: Any, node: Any, state: Rows, spec: Any, begin: Any, end: Any) -> Any:
    """x[:n], x[n:] of two batches one after the other."""
    place = spec.place_of(state.axis)
    one_block = b.rows * state.unit
    first = Dim(0) if node.attr("begin_mask") >> place & 1 else begin.entries[place].divided_by(one_block)
    last = state.blocks if node.attr("end_mask") >> place & 1 else end.entries[place].divided_by(one_block)
    if first is None or last is None or None in (first.number, last.number, state.blocks.number):
        return None
    first, last, blocks = first.number, last.number, state.blocks.number
    if not 0 <= first < last <= blocks:
        return None
    value = node.inputs[0]
    width = b.local_extent(Rows(state.axis, Dim(1), state.unit))
    rank = len(b.dims(value))
    start, size = [0] * rank, [-1] * rank
    start[state.axis], size[state.axis] = first * width, (last - first) * width
    part = tf.slice(b.held(value), b.as_vector(start, tf.int64), b.as_vector(size, tf.int64))
    masks = {name: _int(node.attr(name) | 1 << place) for name in ("begin_mask", "end_mask")}
    made = b.make(node, [part, *map(b.whole, node.inputs[1:])], **masks)[0]
    return [(made, Rows(spec.output_axis(state.axis), Dim(last - first), state.unit))]


class Specification:
    """Which entry of a StridedSlice's vectors speaks of which axis."""

    def __init__(self, node: Any, entries: int, rank: int) -> None:
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
def strided_slice_grad(b: Any, node: Any) -> Any:
    shape, begin, end, strides, gradient = node.inputs
    state, dims = b.state(gradient), b.extents.numbers(shape)
    if dims is None or not _all_whole(b, node.inputs[:4]):
        return None
    if state == PARTIAL:
        return [(b.make(node, [*map(b.whole, node.inputs[:4]), b.held(gradient)])[0], PARTIAL)]
    if not isinstance(state, Rows):
        return None
    vectors = [b.extents.numbers(each) for each in (begin, end, strides)]
    if any(each is None for each in vectors):
        return None
    spec = Specification(node, len(vectors[0].entries), len(dims.entries))
    axes = [a for a in range(len(dims.entries)) if spec.output_axis(a) == state.axis and not _shrunk(node, spec, a)]
    axis = axes[0] if axes else None
    if axis is None or dims.entries[axis] != b.extent(state):
        return None  # rows that were a part of the axis
    rows, place = state.at(axis), spec.place_of(axis)
    masks = {}
    if place is not None:
        if vectors[2].entries[place] != 1:
            return None
        masks = {name: _int(node.attr(name) | 1 << place) for name in ("begin_mask", "end_mask")}
    local = b.local_shape(dims.entries, rows, shape.dtype)
    return [(b.make(node, [local, *map(b.whole, node.inputs[1:4]), b.held(gradient)], **masks)[0], rows)]


def _shrunk(node: Any, spec: Specification, axis: int) -> bool:
    place = spec.place_of(axis)
    return place is not None and bool(node.attr("shrink_axis_mask") >> place & 1)


@rule("Slice")
def slice_(b: Any, node: Any) -> Any:
    value = node.inputs[0]
    state, dims = b.state(value), b.dims(value)
    begin, size = (b.extents.numbers(each) for each in node.inputs[1:])
    if dims is None or begin is None or size is None or not _all_whole(b, node.inputs[1:]):
        return None
    if isinstance(state, Partial):
        return [(b.make(node, [b.held(value), *map(b.whole, node.inputs[1:])])[0], state)]
    axis = state.axis
    if begin.entries[axis] != 0 or size.entries[axis] not in (Dim(-1), dims[axis]):
        return None
    sizes = [Dim(-1) if i == axis else each for i, each in enumerate(size.entries)]
    made = tf.slice(b.held(value), b.vector(begin.entries, tf.int64), b.vector(sizes, tf.int64))
    return [(made, state)]


@rule("ConcatV2")
def concat(b: Any, node: Any) -> Any:
    parts, axis = list(node.inputs[:-1]), b.constants(node.inputs[-1])
    states = [b.state(each) for each in parts]
    dims = [b.dims(each) for each in parts]
    if axis is None or any(each is None for each in dims):
        return None
    at = axis[0] % len(dims[0])
    if all(each == PARTIAL for each in states):
        return [(b.make(node, [*map(b.held, parts), b.whole(node.inputs[-1])])[0], PARTIAL)]
    rows = next((each for each in states if isinstance(each, Rows)), None)
    if rows is None:
        return None
    if rows.axis != at:
        if any(not b.fits(each, rows) for each in parts):
            return None
        b.wholes([each for each, state in zip(parts, states) if isinstance(state, Partial)])
        return [(b.make(node, [*(b.cut(each, rows) for each in parts), b.whole(node.inputs[-1])])[0], rows)]
    return _one_after_the_other(b, node, parts, dims, rows, at)


def _one_after_the_other(b: Any, node: Any, parts: Any, dims: Any, rows: Rows, at: int) -> Any:
    """Batches one after the other: blocks of the same unit."""
    cuts = []
    for value, shape in zip(parts, dims):
        state = b.state(value)
        if isinstance(state, Rows) and state.axis == at and state.unit == rows.unit:
            cuts.append(state)
            continue
        blocks = shape[at].divided_by(b.rows * rows.unit)
        if blocks is None or blocks.number == 0:
            return None
        cuts.append(Rows(at, blocks, rows.unit))
    total = Dim(0)
    for each in cuts:
        total = total + each.blocks
    b.wholes([each for each in parts if isinstance(b.state(each), Partial)])
    made = b.make(node, [*(b.cut(each, cut) for each, cut in zip(parts, cuts)), b.whole(node.inputs[-1])])[0]
    return [(made, Rows(at, total, rows.unit))]


@rule("Split", "SplitV")
def split(b: Any, node: Any) -> Any:
    value = node.inputs[1 if node.type == "Split" else 0]
    given = b.constants(node.inputs[0 if node.type == "Split" else 2])
    state, dims = b.state(value), b.dims(value)
    others = [each for each in node.inputs if each is not value]
    if given is None or dims is None or not _all_whole(b, others):
        return None
    axis = given[0] % len(dims)
    if not isinstance(state, Rows):
        return [(each, state) for each in b.make(node, [b.held(e) for e in node.inputs])]
    if axis != state.axis:
        return [(each, state) for each in b.make(node, [b.held(e) for e in node.inputs])]
    count = len(node.outputs)
    blocks = state.blocks.number
    if node.type == "SplitV":
        sizes = b.extents.numbers(node.inputs[1])
        if sizes is None or len({*sizes.entries}) != 1 or sizes.entries[0] * count != dims[axis]:
            return None
    if blocks is None or blocks % count:
        return None
    pieces = tf.split(b.held(value), count, axis)
    return [(each, Rows(axis, Dim(blocks // count), state.unit)) for each in pieces]


@rule("Tile")
def tile(b: Any, node: Any) -> Any:
    value, times = node.inputs[0], b.extents.numbers(node.inputs[1])
    state = b.state(value)
    if times is None or not isinstance(b.state(node.inputs[1]), Whole):
        return None
    if not isinstance(state, Rows) or times.entries[state.axis].factor < 1:
        return None
    made = b.make(node, [b.held(value), b.whole(node.inputs[1])])[0]
    # The whole batch n times, one after the other.
    return [(made, Rows(state.axis, state.blocks * times.entries[state.axis], state.unit))]
