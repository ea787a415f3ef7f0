"""Rows of tables that are combined by segment as they are looked up, as `tf.nn.embedding_lookup_sparse` does.

A segment has the rows for one row of the batch (operations/segments.py). So a rank needs the rows of its segments, and
has the gradients of these.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.analysis.dims import certain, if_certain
from keras_ddl.cut.analysis.placements import JOINED, REPLICATED, PlacedOutputs, Sharded
from keras_ddl.cut.analysis.program import SHAPE_OPS, Node, Value
from keras_ddl.cut.operations import segments
from keras_ddl.cut.operations.context import Context
from keras_ddl.cut.operations.factors import Kind, kind_of
from keras_ddl.cut.shards.table_rows import Repeated, TableRows, sharding_of_rows
from keras_ddl.cut.values.layouts import Layout

TYPES = (*segments.COMBINING_ROWS, *(f"{each}WithNumSegments" for each in segments.COMBINING_ROWS))
GRADIENTS = tuple(f"{each}Grad" for each in segments.COMBINING_ROWS)
_SPARSE = tuple(f"{each}GradV2" for each in segments.COMBINING_ROWS)  # they give rows of the gradient with indices
SUMS = ("UnsortedSegmentSum", *GRADIENTS, *_SPARSE)


class Sums(NamedTuple):
    """Rows that are added up by index, one for each of the `indices`. distinct: the indices, each once."""

    indices: Value
    rows: Value
    distinct: Value


def combine(b: Context, rows: TableRows, node: Node) -> PlacedOutputs | None:
    """Looks up the rows of segments, and combines them: each rank those of its rows of the batch, or all of them."""
    table, indices, *others = node.inputs
    if b.origin(table) in rows.postponed:
        found = distinct(b, rows, indices)
        assert found is not None
        table, indices = rows.postponed[b.origin(table)], found.inputs[0]
    placement = if_certain(segments.sharding_by, b, indices, node)
    if placement is not None:
        looked_up = rows.look_up(node, table, indices, placement)
        return None if looked_up is None else _of_own_rows(b, node, looked_up[0][0], placement)
    b.all_replicated([indices, *others])
    everyone = b.new_value(node, indices.tensor, b.replicated(indices), REPLICATED)
    b.extents.set_dims(everyone, b.dims(indices))
    looked_up = rows.look_up(node, table, everyone)
    if looked_up is None:
        return None
    found = looked_up[0][0]
    order = tf.range(tf.shape(found, indices.dtype)[0])
    return [(b.make(node, [found, order, *map(b.replicated, others)])[0], REPLICATED)]


def _of_own_rows(b: Context, node: Node, found: tf.Tensor, placement: Sharded) -> PlacedOutputs:
    """Combines the rows that were looked up for this rank's rows of the batch."""
    own = b.segments[placement.rows[0]]
    operands = [found, tf.range(tf.shape(found, node.inputs[1].dtype)[0]), segments.own_ids(b, placement, own, own.ids)]
    if len(node.inputs) > 3:
        operands.append(b.scalar(b.local_extent(own.rows), node.inputs[3].dtype))
    result = b.make(node, operands)[0]
    return [(result if len(node.inputs) > 3 else segments.padded(b, result, own.rows), own.rows)]


def distinct(b: Context, rows: TableRows, places: Value) -> Node | None:
    """Returns the operation that makes indices distinct, if `places` are those of the indices among the distinct ones;
    else None."""
    value = rows.before_reshape(places) if b.is_placed(places) else places.source()
    is_place = value.node.type in ("Unique", "UniqueV2") and value.index == 1
    return value.node if is_place and value.node.inputs[0].rank == 1 else None


def postpone(b: Context, rows: TableRows, node: Node, table: Value) -> PlacedOutputs | None:
    """Postpones a look-up of distinct rows that are only repeated, or combined by segment: then the rows of all indices
    are looked up, each rank its own, of which none travels twice anyway. None: it is another look-up."""
    found = node.inputs[1].source().node
    if node.outputs[0].rank != 2 or found.type not in ("Unique", "UniqueV2"):
        return None
    if b.scope or not all(_takes_places(b, rows, each, found) for each in _readers(b, node.outputs[0])):
        return None
    value = node.outputs[0]
    rows.postponed[value] = table
    b.register_replicator(value, lambda: certain(rows.look_up(node, table, node.inputs[1]))[0][0])
    return [(tf.zeros([0], value.dtype), JOINED)]


def _readers(b: Context, value: Value) -> Iterator[Node]:
    for each in b.program.readers(value):
        if each.outputs and kind_of(each) is Kind.FORWARD and len(each.inputs) == 1:
            yield from _readers(b, each.outputs[0])
        else:
            yield each


def _takes_places(b: Context, rows: TableRows, reader: Node, found: Node) -> bool:
    if reader.type in SHAPE_OPS:
        return True
    is_look_up = reader.type in TYPES or reader.type == "GatherV2" and reader.inputs[2].constant() in (0, -2)
    return is_look_up and distinct(b, rows, reader.inputs[1]) is found


def repeated(b: Context, rows: TableRows, node: Node) -> PlacedOutputs | None:
    """Builds what reads the rows of a postponed look-up."""
    if node.type in TYPES:
        return combine(b, rows, node)
    found = distinct(b, rows, node.inputs[1])
    assert found is not None
    return rows.look_up(node, rows.postponed[b.origin(node.inputs[0])], found.inputs[0])


def add_up(b: Context, rows: TableRows, node: Node, layout: Layout) -> tf.Tensor | None:
    """Returns this rank's rows of the gradient of a table, which is a dense one; None: ranks are to add it up."""
    gradient, indices, *others = node.inputs
    number = layout.rows_of(b.collectives.rank)[1]
    own = rows_of_gradient(b, rows, node)
    if own is not None:
        arrived = rows.arrived(node, indices, own, layout)
        return None if arrived is None else tf.math.unsorted_segment_sum(arrived.rows, arrived.places, number)
    tensors = dict(zip(node.inputs, b.all_replicated(node.inputs)))
    # The rows of other ranks are added up in one row more, because the number of rows of a segment counts.
    at = rows.own_places(tensors[indices], layout)
    last, outside = (tf.constant(each, at.dtype) for each in (number, -1))
    has_row = (tensors[indices] >= 0) & (at < number)
    places = tf.where(has_row, tf.where(at < 0, last, at), outside)
    count = tf.constant(number + 1, others[-1].dtype)
    return b.make(node, [tensors[gradient], places, tensors[others[0]], count])[0][:number]


def sums(b: Context, rows: TableRows, node: Node) -> Sums | None:
    """Returns what an operation of `SUMS` adds up for each of the distinct indices of a table's rows; None: it is not
    certain. Raises: Pending."""
    if node.type in _SPARSE:
        added = rows_of_gradient(b, rows, node)
        return None if added is None else Sums(node.inputs[1], added, node.outputs[1])
    found = distinct(b, rows, node.inputs[1])
    if found is None:
        return None
    added = node.inputs[0] if node.type == "UnsortedSegmentSum" else rows_of_gradient(b, rows, node)
    if added is None or sharding_of_rows(b, found.inputs[0], added) is None:
        return None
    return Sums(found.inputs[0], added, found.outputs[0])


def rows_of_gradient(b: Context, rows: TableRows, node: Node) -> Value | None:
    """Returns the rows that a gradient adds up by index, one for each index: a rank has those of its own segments.
    None: it is not certain which they are."""
    if node not in rows.made:
        gradient, indices, ids, _ = node.inputs
        extent = b.dims(indices)[0]
        known = [number for number, own in b.segments.items() if b.rows_of_batches[number] == extent]
        if not known or not segments.has(b, ids, b.segments[known[0]]):
            return None
        placement, own = Sharded(0, rows=(known[0],)), b.segments[known[0]]
        if not b.can_shard(gradient, own.rows):
            return None
        at, local = segments.own_ids(b, placement, own, own.ids), b.redistributed(gradient, own.rows)
        if not node.type.startswith("SparseSegmentSum"):
            counts = tf.math.unsorted_segment_sum(tf.ones_like(at, local.dtype), at, tf.shape(local)[0])
            counts = tf.maximum(counts, 1)[:, tf.newaxis]
            local /= tf.sqrt(counts) if node.type.startswith("SparseSegmentSqrtN") else counts
        value = b.new_value(node, tf.TensorSpec([None, local.shape[1]], local.dtype), tf.gather(local, at), placement)
        b.extents.set_dims(value, (extent, *b.dims(gradient)[1:]))
        rows.repeated[value] = Repeated(gradient, local, at)
        rows.made[node] = value
    return rows.made[node]
