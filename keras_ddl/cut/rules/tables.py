"""Look-ups in a variable that is held sharded, and rows scattered into it: tables of embeddings on the model axis."""

from __future__ import annotations

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.context import Context
from keras_ddl.cut.dims import Uncertain
from keras_ddl.cut.placements import PARTIAL, PlacedOutputs, Sharded
from keras_ddl.cut.program import Node
from keras_ddl.cut.propagation import propagate
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
    at = b.replicated(indices)
    if placement.axis:
        return [(b.make(node, [b.local(table), at])[0], placement.at(indices.rank + placement.axis - 1))]
    if not node.outputs[0].dtype.is_floating:  # integers and booleans of other ranks are no parts of a sum
        return None
    mine, place = _own_rows(b, placement, at)
    rows = b.make(node, [b.local(table), place])[0]
    for _ in range(rows.shape.rank - indices.rank):
        mine = mine[..., tf.newaxis]
    return [(tf.where(mine, rows, tf.zeros([], rows.dtype)), PARTIAL)]


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


def _own_rows(b: Context, placement: Sharded, at: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns which of these rows of a table this rank has, and their places in its shard.

    For another rank's rows the place is that of any row. A row that no rank has stays out of range, so that looking it
    up fails as it does in one process.
    """
    first, count = _own_range(b, placement)
    mine = (at >= first) & (at < first + count)
    exists = (at >= 0) & (at < count * b.batch.total)
    outside = tf.constant(-1, at.dtype)
    return mine, tf.where(mine, at - first, tf.where(exists, tf.zeros([], at.dtype), outside))
