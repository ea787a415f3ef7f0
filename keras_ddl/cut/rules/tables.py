"""Tables that are cut along the model axis: look-ups, rows that are scattered."""

from __future__ import annotations

from collections.abc import Callable

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.context import Context
from keras_ddl.cut.dims import Uncertain
from keras_ddl.cut.placements import PARTIAL, PlacedOutputs, Sharded
from keras_ddl.cut.program import Node
from keras_ddl.cut.propagation import propagate, sharded_only
from keras_ddl.cut.registry import rule
from keras_ddl.cut.rules import indexing
from keras_ddl.cut.variable_ops import SCATTER_ADD, SCATTER_SUB, SCATTER_UPDATE


@rule("ResourceGather")
def look_up(b: Context, node: Node) -> PlacedOutputs | None:
    """Cut along its width, a table gives that of each row; along its rows, each rank gives those that it has."""
    table, indices = node.inputs
    placement = b.placement(table)
    if not isinstance(placement, Sharded):
        return propagate(b, node)
    if node.attr("batch_dims", int) or indices.rank is None:
        return None
    if placement.axis:
        at = b.replicated(indices)
        return [(b.make(node, [b.local(table), at])[0], placement.at(indices.rank + placement.axis - 1))]
    return _own_rows_of(b, node, placement, lambda place: [b.local(table), place])


@rule("GatherV2")
def look_up_in_tensor(b: Context, node: Node) -> PlacedOutputs | None:
    """In what was read of a table that is cut along its rows, each rank gives those that it has."""
    table, indices, axis = node.inputs
    placement = b.placement(table)
    is_cut = isinstance(placement, Sharded) and placement.axis == 0 and not b.rows_by_extent
    if not is_cut or node.attr("batch_dims", int) or b.extents.constants(axis) != [0] or indices.rank is None:
        return propagate(b, node)
    assert isinstance(placement, Sharded)
    return _own_rows_of(b, node, placement, lambda place: [b.local(table), place, b.replicated(axis)])


def _own_rows_of(
    b: Context, node: Node, placement: Sharded, operands: Callable[[tf.Tensor], list[tf.Tensor]]
) -> PlacedOutputs | None:
    """Builds a look-up in a table that is cut along its rows: of other ranks' rows, zeros.

    operands: given the places of rows in this rank's slice, returns those of the operation.
    """
    indices, output = node.inputs[1], node.outputs[0]
    if not output.dtype.is_floating or indices.rank is None:  # integers and booleans of other ranks are no parts
        return None
    mine, place = own_rows(b, placement, b.replicated(indices))
    rows = b.make(node, operands(place))[0]
    for _ in range(rows.shape.rank - indices.rank):
        mine = mine[..., tf.newaxis]
    return [(tf.where(mine, rows, tf.zeros([], rows.dtype)), PARTIAL)]


@rule("UnsortedSegmentSum", of_replicated=True)
def gradient_of_look_up(b: Context, node: Node) -> PlacedOutputs | None:
    """The gradient of a table that is cut along its rows: a rank adds up those that it has."""
    if b.rows_by_extent:
        return None
    made = b.make_replicated(node)
    data, ids, _ = node.inputs

    def materializer(placement: Sharded) -> tf.Tensor:
        if placement.axis or placement.blocks != 1:
            raise Uncertain
        first, count = _own_range(b, placement)
        at = b.replicated(ids)
        mine = (at >= first) & (at < first + count)
        # Negative ones are left out, and one that is too large is an error, as in one process.
        too_large = tf.constant(count, at.dtype)
        place = tf.where(mine, at - first, tf.where(at < count * b.batch.total, tf.constant(-1, at.dtype), too_large))
        return b.make(node, [b.replicated(data), place, tf.constant(count, node.inputs[2].dtype)])[0]

    if not node.after:
        b.register_materializer(node.outputs[0], sharded_only(materializer))
    return made


@rule(SCATTER_ADD, SCATTER_SUB, SCATTER_UPDATE)
def scatter(b: Context, node: Node) -> PlacedOutputs | None:
    """Rows scattered into a table: their own width of them, or those of them that lie on this rank."""
    table, indices, updates = node.inputs
    placement = b.placement(table)
    if not isinstance(placement, Sharded):
        return indexing.scatter(b, node) if node.type in (SCATTER_ADD, SCATTER_SUB) else None
    if indices.rank is None or updates.rank is None or updates.rank < indices.rank:
        raise Uncertain
    b.all_replicated([each for each in (indices, updates) if not isinstance(b.placement(each), Sharded)])
    if placement.axis:
        shard = placement.at(indices.rank + placement.axis - 1)
        b.make(node, [b.local(table), b.replicated(indices), b.sharded(updates, shard)])
        return []
    at, rows = b.replicated(indices), b.replicated(updates)
    first, count = _own_range(b, placement)
    mine = tf.where((at >= first) & (at < first + count))
    b.make(node, [b.local(table), tf.gather_nd(at, mine) - first, tf.gather_nd(rows, mine)])
    return []


def _own_range(b: Context, placement: Sharded) -> tuple[int, int]:
    count, first = b.local_extent(placement), b.batch.offset
    assert isinstance(count, int) and isinstance(first, int)
    return first * count, count


def own_rows(b: Context, placement: Sharded, at: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns which of these rows of a table this rank has, and their places in its shard.

    For another rank's rows the place is that of any row. A row that no rank has stays out of range, so that looking it
    up fails as it does in one process.
    """
    first, count = _own_range(b, placement)
    mine = (at >= first) & (at < first + count)
    exists = (at >= 0) & (at < count * b.batch.total)
    outside = tf.constant(-1, at.dtype)
    return mine, tf.where(mine, at - first, tf.where(exists, tf.zeros([], at.dtype), outside))
