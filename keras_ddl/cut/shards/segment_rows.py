"""Rows of tables that are combined by segment as they are looked up, as `tf.nn.embedding_lookup_sparse` does.

A segment has the rows for one row of the batch (operations/segments.py). So a rank needs the rows of its segments, and
has the gradients of these.
"""

from __future__ import annotations

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.analysis.dims import if_certain
from keras_ddl.cut.analysis.placements import REPLICATED, PlacedOutputs, Sharded
from keras_ddl.cut.analysis.program import Node, Value
from keras_ddl.cut.operations import segments
from keras_ddl.cut.operations.context import Context
from keras_ddl.cut.shards.table_rows import TableRows
from keras_ddl.cut.values.layouts import Layout

_COMBINED = ("SparseSegmentSum", "SparseSegmentMean", "SparseSegmentSqrtN")
TYPES = (*_COMBINED, *(f"{each}WithNumSegments" for each in _COMBINED))
GRADIENTS = tuple(f"{each}Grad" for each in _COMBINED)
SPARSE_GRADIENTS = tuple(f"{each}GradV2" for each in _COMBINED)  # rows of the gradient, and their indices


def combine(b: Context, rows: TableRows, node: Node) -> PlacedOutputs | None:
    """Looks up the rows of segments, and combines them: each rank those of its rows of the batch, or all of them."""
    table, indices, *others = node.inputs
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
        rows.made[node] = value
    return rows.made[node]
