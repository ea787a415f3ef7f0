"""Builds operations on tables in flat shards where the rows are: look-ups, and the sums that form a table's gradient.

A function returns None if the table should be gathered instead, or if each rank should add up its own rows.
"""

from __future__ import annotations

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.analysis.dims import if_certain
from keras_ddl.cut.analysis.placements import FLAT_SHARD, JOINED, REPLICATED, PlacedOutputs, Sharded
from keras_ddl.cut.analysis.program import Node, Value
from keras_ddl.cut.operations.context import Context
from keras_ddl.cut.shards import segment_rows
from keras_ddl.cut.shards.joined_rows import JoinedRows
from keras_ddl.cut.shards.shard_plan import SCATTER_INTO, expands_indices
from keras_ddl.cut.shards.table_rows import TableRows, is_added_to_a_part

# They put rows into a table, in the order of the rows.
TOWARDS_TABLES = ("UnsortedSegmentSum", SCATTER_INTO, *segment_rows.GRADIENTS)


def look_up(b: Context, rows: TableRows, node: Node, table: Value) -> PlacedOutputs | None:
    """Builds a look-up in a table, which is the operation's first operand or was read from it."""
    if len(node.inputs) < 2:
        return None
    indices = node.inputs[1]
    if node.type in ("GatherV2", "ResourceGather"):
        axes = [if_certain(b.extents.constants, each) for each in node.inputs[2:]]
        is_of_rows = all(each in ([0], [-2]) for each in axes) and not node.attr("batch_dims", int)
        if not is_of_rows:
            return None
        return segment_rows.postpone(b, rows, node, table) or rows.look_up(node, table, indices)
    if node.type in ("GatherNd", "ResourceGatherNd"):
        if not indices.rank or indices.shape[-1] != 1:
            return None
        if node not in rows.made:
            rows.made[node] = _of_one(b, node, indices)
        return rows.look_up(node, table, rows.made[node])
    return segment_rows.combine(b, rows, node) if node.type in segment_rows.TYPES else None


def _of_one(b: Context, node: Node, indices: Value) -> Value:
    """Returns indices without their last axis, which has one entry."""
    placement = b.placement(indices)
    is_sharded = isinstance(placement, Sharded) and placement.axis < len(b.dims(indices)) - 1
    tensor = tf.squeeze(b.local(indices) if is_sharded else b.replicated(indices), -1)
    like = tf.TensorSpec(indices.shape[:-1], indices.dtype)
    value = b.new_value(node, like, tensor, placement if is_sharded else REPLICATED)
    b.extents.set_dims(value, b.dims(indices)[:-1])
    return value


def add_up(b: Context, rows: TableRows, joined: JoinedRows, node: Node) -> PlacedOutputs | None:
    """Builds a sum of rows by index on its way to a table: each rank adds up the rows that it has of the table."""
    layout = rows.layout_of(node.outputs[0].shape)
    if layout is None or is_added_to_a_part(b, node.outputs[0]):
        return None
    if node.type in segment_rows.GRADIENTS:
        chunk = segment_rows.add_up(b, rows, node, layout)
        return None if chunk is None else _chunk(b, chunk)
    number = layout.rows_of(b.collectives.rank)[1]
    if node.type == SCATTER_INTO:
        table, expanded, data = node.inputs
        if not expands_indices(expanded.node):
            return None
        arrived = joined.arrived(node, expanded.node.inputs[0], data, layout)
        if arrived is None:
            return None
        chunk = tf.reshape(b.redistributed(table, FLAT_SHARD), [number, layout.unit])
        return _chunk(b, tf.tensor_scatter_nd_update(chunk, arrived.places[:, tf.newaxis], arrived.rows))
    data, ids, count = node.inputs
    placements = [b.placement(each) for each in (ids, data)]
    sharded = None if JOINED in placements else next((each for each in placements if isinstance(each, Sharded)), None)
    if b.placement(count) != REPLICATED or sharded and not rows.moves_less(ids, layout, data.dtype, sharded):
        return None
    arrived = joined.arrived(node, ids, data, layout)
    if arrived is None:
        return None
    # As in one process, rows with a negative index are left out, and an index that is too large is an error.
    return _chunk(b, tf.math.unsorted_segment_sum(arrived.rows, arrived.places, number))


def _chunk(b: Context, rows: tf.Tensor) -> PlacedOutputs:
    result = tf.reshape(rows, [-1])
    b.ran(result.op)
    return [(result, FLAT_SHARD)]
