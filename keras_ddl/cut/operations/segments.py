"""Segments: entries along an axis that belong to rows, as the values of a ragged tensor belong to rows of the batch.

A vector of ids, which does not decrease, says to which row each entry belongs. So the entries of a rank's rows lie one
after another, and can be placed on this rank: they are a further batch (`LocalShapes.add_batch`), whose numbers of
entries the step finds in the ids, which every rank has. What is combined by segment is sharded like the rows again.

An axis is seen like this only if its entries are combined by segment later. It may be any such axis: if the rows are
not those of the batch, a rank has more entries than others, but the right ones.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.analysis.dims import ONE, Dim, Uncertain, certain, if_certain, product
from keras_ddl.cut.analysis.extents import Extents, ResultExtents, extents
from keras_ddl.cut.analysis.placements import REPLICATED, Batch, PlacedOutputs, Placement, Sharded
from keras_ddl.cut.analysis.program import Node, Program, Value
from keras_ddl.cut.operations.context import Context, Segments
from keras_ddl.cut.operations.factors import Kind, kind_of
from keras_ddl.cut.values import redistribute
from keras_ddl.cut.values.local_shapes import no_dependencies

_SORTED = ("SegmentSum", "SegmentMean", "SegmentProd", "SegmentMin", "SegmentMax")  # they fail if ids decrease
_UNSORTED = ("UnsortedSegmentSum", "UnsortedSegmentProd", "UnsortedSegmentMin", "UnsortedSegmentMax")
COMBINING = (*_SORTED, *_UNSORTED)
LOOK_UPS = ("GatherV2", "ResourceGather")
_MASKS = ("shrink_axis", "begin", "end", "ellipsis", "new_axis")
COMBINING_ROWS = ("SparseSegmentSum", "SparseSegmentMean", "SparseSegmentSqrtN")


def combined_later(program: Program, value: Value) -> Iterator[Node]:
    """Yields the operations that combine a value's entries by segment, perhaps after entrywise computations."""
    pending, seen = [value], {value}
    while pending:
        for node in program.readers(pending.pop()):
            if node.type in COMBINING and node.inputs[0] in seen:
                yield node
            elif node.outputs and kind_of(node) in (Kind.ENTRYWISE, Kind.FORWARD):
                new = [each for each in node.outputs if each not in seen]
                seen.update(new)
                pending += new


def can_be_before(node: Node, other: Node) -> bool:
    """Returns whether an operation can be built before another one and certainly needs no rows of a table.

    Rows of a table may wait for operations themselves.
    """
    pending, seen = [node], set[Node]()
    while pending:
        each = pending.pop()
        if each is other or each.type in LOOK_UPS and each.outputs[0].dtype.is_floating:
            return False
        if each not in seen and each.position > other.position:
            seen.add(each)
            pending += [*(value.node for value in each.inputs), *each.after]
    return True


# ---- the entries of a rank's rows


def sharding_by(b: Context, entries: Value, node: Node) -> Sharded | None:
    """Returns how entries can be sharded that `node` combines by segment, now or later; None: not certain."""
    is_of_table = node.type.startswith(COMBINING_ROWS)
    ids, *count = node.inputs[2 if is_of_table else 1 :]
    if b.scope or not b.rows_by_extent or entries.rank != 1 or ids.rank != 1 or not b.is_placed(ids):
        return None  # a branch's batch would have no meaning outside
    if b.placement(ids) != REPLICATED and not b.has_replicated(ids):
        return None
    extent, tensor = b.dims(entries)[0], b.replicated(ids)
    _equate_others(b, node, ids, extent)
    if not is_of_table and b.dims(node.inputs[0])[:1] != (extent,):
        return None  # it combines something else, to which the entries were broadcast
    for number, known in b.segments.items():
        if known.ids is tensor or b.rows_of_batches[number] == extent:
            return _as_known(b, known, number, extent) if known.ids is tensor else None
    if len(extent.unknowns) != 1 or extent.factor != 1 or extent in b.rows_of_batches:
        return None
    is_sorted = node.type in _SORTED or is_of_table
    if not is_sorted and not _is_sorted(b.extents, ids):
        return None
    checks = [tf.equal(tf.size(tensor, tf.int64), b.number(extent))]
    if is_sorted:
        checks.append(tf.reduce_all(tensor[1:] >= tensor[:-1]))
    if count:
        of_rows = if_certain(_sharding_of, b, b.extents.number(count[0]))
    else:
        of_rows = _all_required(b, node, tensor, checks)
    if of_rows is None:
        return None
    own = _counted(b, tensor, of_rows, checks)
    number = b.add_batch(extent, own)
    b.segments[number] = Segments(tensor, of_rows)
    _equate(b, b.dims(ids)[0], extent)
    return Sharded(0, rows=(number,))


def combined_by(program: Program, ids: Value) -> list[Value]:
    """Returns what the program combines by these segment ids."""
    return [each.inputs[0] for each in program.readers(ids) if each.type in COMBINING and each.inputs[1] is ids]


def _equate_others(b: Context, node: Node, ids: Value, extent: Dim) -> None:
    """Notes that other values that are combined by the same ids, such as weights, have as many entries as these, if
    there certainly are as many ids. Otherwise the step fails, which is checked where ranks have only their entries."""
    for each in combined_by(b.program, ids) if _count(b, ids) == extent else ():
        other = (if_certain(b.dims, each) or [extent])[0] if each is not node.inputs[0] else extent
        if other != extent and len(other.unknowns) == 1 == other.factor and _is_known(b, other):
            b.assumed.append(tf.equal(*(tf.cast(b.number(extent), tf.int64) for extent in (other, extent))))
            _equate(b, other, extent)


def _count(b: Context, ids: Value) -> Dim:
    """Returns the number of ids, which may be the first column of the indices of a sparse tensor."""
    node = ids.source().node
    while node.type == "Cast":
        node = node.inputs[0].source().node
    masks = [node.attr(f"{name}_mask", int) for name in _MASKS] if node.type == "StridedSlice" else []
    is_column = masks[:1] == [2] and not any(masks[3:]) and masks[1] & masks[2] & 1
    takes_all = is_column and if_certain(b.extents.constants, node.inputs[3]) == [1, 1]
    return b.dims(node.inputs[0] if takes_all else ids)[0]


def _as_known(b: Context, known: Segments, number: int, extent: Dim) -> Sharded | None:
    """Returns the sharding of entries with the same ids as those of a known batch."""
    rows, batch = b.rows_of_batches[number], b.batches[number]
    if rows != extent and (len(extent.unknowns) != 1 or extent.factor != 1):
        return None
    if rows != extent or b.assumed:
        checks = [tf.equal(batch.total, b.number(extent))]
        with no_dependencies(), tf.control_dependencies([_assert(b, checks, known.ids)]):
            b.batches[number] = batch._replace(offset=tf.identity(batch.offset))
        _equate(b, extent, rows)
    return Sharded(0, rows=(number,))


def _assert(b: Context, checks: list[tf.Tensor], ids: tf.Tensor) -> tf.Operation:
    message = (
        "Segment ids must not decrease, must be as many as the entries, and must be those of all rows if the step goes "
        f"on with all rows (rank {b.collectives.rank}). Received:"
    )
    holds = tf.reduce_all(tf.stack([*checks, *b.assumed]))
    b.assumed.clear()
    return tf.debugging.Assert(holds, [message, ids], summarize=8)


def _equate(b: Context, one: Dim, other: Dim) -> None:
    if len(one.unknowns) == 1 and one.factor == 1:
        b.extents.equate(one, other)


def _sharding_of(b: Context, rows: Dim) -> Sharded:
    """Returns the sharding of an axis of the batch's extent, or of a multiple."""
    unit = certain(rows.divided_by(b.rows))
    if unit == 0:
        raise Uncertain
    return Sharded(0, unit=unit)


def _all_required(b: Context, node: Node, ids: tf.Tensor, checks: list[tf.Tensor]) -> Sharded | None:
    """Returns the sharding of a result whose rows end with the last id. If the step fails unless these are all rows of
    the batch, they are taken for these, and it is checked."""
    result = node.outputs[0]
    last = tf.concat([[-1], tf.cast(ids[-1:], tf.int64)], 0)[-1] + 1
    extent = b.dims(result)[0]
    if extent.number is not None:
        return None
    required = if_certain(_required, b, result)
    if required is not None:
        checks.append(tf.equal(last, b.number(required)))
        _equate(b, extent, required)
        return _sharding_of(b, required)
    offset = tf.minimum(tf.cast(b.batch.offset, tf.int64), last)
    is_last = b.collectives.rank == b.collectives.size - 1
    end = last if is_last else tf.minimum(tf.cast(b.batch.offset + b.batch.local, tf.int64), last)
    return Sharded(0, rows=(b.add_batch(extent, Batch(last, end - offset, offset)),))


def _required(b: Context, result: Value) -> Dim:
    """Returns how many rows a result must have for the step not to fail. Raises: Uncertain: it may have any number."""
    rows, *others = b.dims(result)
    pending, seen = [result], {result}
    while pending:
        value = pending.pop()
        for node in b.program.readers(value):
            found = None
            if node.type == "Select" and value is not node.inputs[0]:  # its operands are not broadcast
                found = next(iter(b.dims(node.inputs[0])), None)
            elif node.type == "Reshape" and value is node.inputs[0] and product(others).number:
                found = b.extents.size(node.outputs[0]).divided_by(product(others))
            if (
                found is not None
                and found != rows
                and _is_known(b, found)
                and if_certain(_sharding_of, b, found) is not None
            ):
                return found
            if node.outputs and kind_of(node) in (Kind.ENTRYWISE, Kind.FORWARD):
                new = [each for each in node.outputs if each not in seen and b.dims(each) == b.dims(result)]
                seen.update(new)
                pending += new
    raise Uncertain


def _is_known(b: Context, extent: Dim) -> bool:
    """Returns whether the step can compute an extent already."""
    others = [each for each in extent.leaves() if each.kind != "rows"]
    return all(any(map(b.is_placed, b.extents.values_named(str(each.operands[0])))) for each in others)


def _counted(b: Context, ids: tf.Tensor, rows: Sharded, checks: list[tf.Tensor]) -> Batch:
    """Returns the entries of a rank's rows. The first and the last rank have those of rows that no rank has."""
    first = first_row(b, rows)
    ends = tf.stack([tf.cast(each, tf.int64) for each in (first, first + b.local_extent(rows))])
    with no_dependencies():
        total = tf.size(ids, tf.int64)
        places = tf.searchsorted(tf.cast(ids, tf.int64), ends, out_type=tf.int64)
        with tf.control_dependencies([_assert(b, checks, ids)]):
            begin = tf.constant(0, tf.int64) if b.collectives.rank == 0 else tf.identity(places[0])
            end = tf.identity(total if b.collectives.rank == b.collectives.size - 1 else places[1])
            return Batch(total, end - begin, begin)


def first_row(b: Context, rows: Sharded) -> int | tf.Tensor:
    """Returns where a rank's rows begin, along an axis that is sharded like this."""
    return b.times(b.batches[rows.rows[0]].offset, b.number(rows.unit))


def _is_sorted(known: Extents, value: Value) -> bool:
    """Returns whether numbers from 0 on certainly do not decrease, like ids that TensorFlow makes from splits."""
    value = value.source()
    node = value.node
    if value.rank != 1:
        return False
    of = node.inputs[0].source() if node.inputs else value
    if node.type == "Range":
        start, step = (if_certain(known.constants, each) for each in (node.inputs[0], node.inputs[2]))
        return start == [0] and step is not None and step[0] > 0
    if node.type == "GatherV2":
        along = if_certain(known.constants, node.inputs[2])
        return along == [0] and _is_sorted(known, of) and _is_sorted(known, node.inputs[1])
    if node.type in ("Squeeze", "Reshape"):
        if of.node.type == "Where":
            return of.node.inputs[0].rank == 1
        return of.node.type == "Tile" and _repeats_each(known, of.node) and _is_sorted(known, _column(of.node))
    return False


def _repeats_each(known: Extents, tile: Node) -> bool:
    """Whether a Tile repeats a column along its rows."""
    column, times = tile.inputs[0].source().node, if_certain(known.numbers, tile.inputs[1]) or ()
    if column.type != "ExpandDims" or column.inputs[0].rank != 1 or len(times) != 2:
        return False
    return times[0] == 1 and if_certain(known.constants, column.inputs[1]) in ([1], [-1])


def _column(tile: Node) -> Value:
    return tile.inputs[0].source().node.inputs[0]


# ---- operations


def segments_of(b: Context, placement: Placement) -> tuple[Sharded, Segments] | None:
    """Returns the segments of a value that is sharded along axis 0 into the entries of each rank's rows; None: it is
    not."""
    if not isinstance(placement, Sharded) or len(placement.rows) != 1 or placement.rows[0] not in b.segments:
        return None
    is_plain = placement.axis == 0 and placement.blocks == ONE == placement.unit
    return (placement, b.segments[placement.rows[0]]) if is_plain else None


def own_ids(b: Context, placement: Sharded, segments: Segments, ids: tf.Tensor) -> tf.Tensor:
    """Returns the ids of this rank's entries, counted from its first row. `ids`: of all entries."""
    with no_dependencies():
        own = redistribute.shard(b, ids, placement)
        return own - tf.cast(first_row(b, segments.rows), ids.dtype)


def combine(b: Context, node: Node) -> PlacedOutputs | None:
    """Combines each rank's entries by segment, which gives its rows."""
    data, ids, *count = node.inputs
    found = segments_of(b, b.placement(data))
    if found is None or not has(b, ids, found[1]):
        return None
    placement, segments = found
    own, rows = own_ids(b, placement, segments, segments.ids), segments.rows
    if count:
        if b.extents.number(count[0]) != b.extent(rows):
            return None
        return [(b.make(node, [b.local(data), own, b.scalar(b.local_extent(rows), count[0].dtype)])[0], rows)]
    return [(padded(b, b.make(node, [b.local(data), own])[0], rows), rows)]


def has(b: Context, ids: Value, segments: Segments) -> bool:
    """Whether these are the ids of segments."""
    is_here = b.placement(ids) == REPLICATED or b.has_replicated(ids)
    return is_here and b.replicated(ids) is segments.ids


def padded(b: Context, result: tf.Tensor, rows: Sharded) -> tf.Tensor:
    """Returns a result with all of this rank's rows, which ended with the last id. An operation by segment gives zeros
    for a row without entries."""
    missing = tf.cast(b.local_extent(rows), tf.int64) - tf.shape(result, tf.int64)[0]
    return tf.pad(result, [[0, missing], *[[0, 0]] * (result.shape.rank - 1)])


def repeat(b: Context, node: Node) -> PlacedOutputs | None:
    """Repeats each of this rank's rows for each of its entries, as the gradient of `combine` does."""
    value, indices, *axis = node.inputs
    if not axis or b.extents.constants(axis[0]) != [0] or node.attr("batch_dims", int):
        return None
    for number, segments in b.segments.items():
        if b.placement(value) == segments.rows and has(b, _not_clipped(indices), segments):
            placement = Sharded(0, rows=(number,))
            own = own_ids(b, placement, segments, b.replicated(indices))
            return [(b.make(node, [b.local(value), own, b.replicated(axis[0])])[0], placement)]
    return None


def repeated(b: Context, value: Value) -> tuple[Value, tf.Tensor, tf.Tensor] | None:
    """Returns the rows that `repeat` has repeated to give a value, this rank's of them, and which of these each row is;
    None: the value is something else.

    TensorFlow replaces the rows of negative ids, of which there are none.
    """
    found = segments_of(b, b.placement(value))
    node = value.source().node
    if found is None or node.type not in ("SelectV2", "GatherV2"):
        return None
    placement, segments = found
    if node.type == "SelectV2":
        if not _has_id(b, node.inputs[0], segments):
            return None
        node = node.inputs[1].source().node
    if node.type != "GatherV2" or b.placement(node.outputs[0]) != placement:
        return None
    rows, indices, axis = node.inputs
    if b.extents.constants(axis) != [0] or not has(b, _not_clipped(indices), segments):
        return None
    return rows, b.redistributed(rows, segments.rows), own_ids(b, placement, segments, segments.ids)


def _has_id(b: Context, condition: Value, segments: Segments) -> bool:
    """Whether a condition holds for all entries, because it is that their ids are not negative."""
    node = condition.source().node
    if node.type == "LogicalAnd":
        one, other = node.inputs
        filled = other.source().node
        is_true = filled.type == "Fill" and bool(np.all(filled.inputs[1].constant()))
        return is_true and _has_id(b, one, segments)
    if node.type == "Reshape":
        return _has_id(b, node.inputs[0], segments)
    return node.type == "GreaterEqual" and node.inputs[1].constant() == 0 and has(b, node.inputs[0], segments)


def _not_clipped(indices: Value) -> Value:
    """Returns indices whose negative ones were replaced by 0."""
    node = indices.source().node
    if node.type != "Maximum":
        return indices
    value, other = node.inputs
    zero = other.constant()
    is_zero = other.source().node.type == "ZerosLike" or zero is not None and not zero.any()
    return value if is_zero else indices


@extents(*_SORTED)
def _combined(known: Extents, node: Node) -> ResultExtents:
    return [[_last_segment(known, node.inputs[1]), *known.dims(node.inputs[0])[1:]]]


@extents(*COMBINING_ROWS)
def _combined_rows(known: Extents, node: Node) -> ResultExtents:
    return [[_last_segment(known, node.inputs[2]), *known.dims(node.inputs[0])[1:]]]


def _last_segment(known: Extents, ids: Value) -> Dim:
    """Returns the number of segments: the last id and one more."""
    ids = ids.source()
    known.dims(ids)
    return Dim.unknown("segments", known.name_of(ids), 0)
