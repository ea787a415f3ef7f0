"""Rules for tables that are cut along the model axis: look-ups, and scattered rows."""

from __future__ import annotations

from collections.abc import Callable

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.analysis.dims import Uncertain, if_certain
from keras_ddl.cut.analysis.placements import PARTIAL, REPLICATED, PlacedOutputs, Sharded
from keras_ddl.cut.analysis.program import Node, Value
from keras_ddl.cut.analysis.variable_ops import ROW_UPDATES, SCATTER_UPDATE
from keras_ddl.cut.operations import segments
from keras_ddl.cut.operations.context import Context
from keras_ddl.cut.operations.factors import Kind, kind_of
from keras_ddl.cut.operations.propagation import propagate, sharded_only
from keras_ddl.cut.operations.registry import rule
from keras_ddl.cut.rules import indexing

_NORMALIZED = "rows of a table that is cut along its width, which are normalized"


@rule("ResourceGather", "GatherV2")
def look_up(b: Context, node: Node) -> PlacedOutputs | None:
    """Looks up rows of a table, or of a tensor that was read from one.

    If a table is cut along its width, a rank looks up its part of every row. If it is cut along its rows, a rank looks
    up only its own rows.
    """
    table, indices, *axis = node.inputs
    placement = b.placement(table)
    if not isinstance(placement, Sharded) or axis and (b.rows_by_extent or b.extents.constants(axis[0]) != [0]):
        return if_certain(segments.repeat, b, node) or propagate(b, node)
    if node.attr("batch_dims", int) or indices.rank is None:
        return propagate(b, node) if axis else None

    def rows_at(place: tf.Tensor) -> tf.Tensor:
        return b.make(node, [b.local(table), place, *map(b.replicated, axis)])[0]

    if placement.axis:
        rows = rows_at(b.replicated(indices))
        return _own_width(b, node, rows, placement.at(indices.rank + placement.axis - 1))
    return _own_rows_of(b, node, placement, rows_at)


def _own_width(b: Context, node: Node, rows: tf.Tensor, placement: Sharded) -> PlacedOutputs:
    """Returns rows that each rank has looked up, cut along their width; gathers them if they are normalized next."""
    output = node.outputs[0]
    if b.in_loop or not _are_reduced(b, output, placement.axis):
        return [(rows, placement)]
    value = b.new_value(node, output.tensor, rows, placement)
    b.extents.set_dims(value, b.dims(output))
    b.report.intends_gather(node, _NORMALIZED)
    return [(b.replicated(value), REPLICATED)]


def _are_reduced(b: Context, value: Value, axis: int) -> bool:
    """Whether entrywise results of a value are reduced along an axis, as in a normalization.

    This needs sums forward and backward, and a residual network repeats them in every following block.
    """
    rank, pending, seen = len(b.dims(value)), [value], {value}
    while pending:
        for node in b.program.readers(pending.pop()):
            kind = kind_of(node)
            if kind is Kind.REDUCTION and node.outputs[0].rank != 0:
                axes = if_certain(b.extents.constants, node.inputs[1]) or []
                if node.inputs[0].rank == rank and axis in [each % rank for each in axes]:
                    return True
            elif kind in (Kind.ENTRYWISE, Kind.FORWARD):
                new = [each for each in node.outputs if each.rank == rank and each not in seen]
                seen.update(new)
                pending += new
    return False


def _own_rows_of(
    b: Context, node: Node, placement: Sharded, rows_at: Callable[[tf.Tensor], tf.Tensor]
) -> PlacedOutputs | None:
    """Builds a look-up in a table that is cut along its rows, with zeros for other ranks' rows.

    rows_at: returns the rows at these places in this rank's slice.
    """
    indices, output = node.inputs[1], node.outputs[0]
    # Integers and booleans cannot be parts of a sum.
    if not output.dtype.is_floating or indices.rank is None or placement.blocks != 1:
        return None
    mine, place = own_rows(b, placement, b.replicated(indices))
    rows = rows_at(place)
    for _ in range(rows.shape.rank - indices.rank):
        mine = mine[..., tf.newaxis]
    return [(tf.where(mine, rows, tf.zeros([], rows.dtype)), PARTIAL)]


@rule("UnsortedSegmentSum", of_replicated=True)
def gradient_of_look_up(b: Context, node: Node) -> PlacedOutputs | None:
    """Builds the gradient of a cut table. A rank adds up its own rows, or its part of the width of all rows."""
    if b.rows_by_extent:
        return None
    made = b.make_replicated(node)
    data, ids, count = node.inputs

    def materializer(placement: Sharded) -> tf.Tensor:
        if placement.blocks != 1 or ids.rank is None:
            raise Uncertain
        if placement.axis:
            own = b.redistributed(data, placement.at(ids.rank + placement.axis - 1))
            return b.make(node, [own, b.replicated(ids), b.replicated(count)])[0]
        first, rows = _own_range(b, placement)
        at = b.replicated(ids)
        mine = (at >= first) & (at < first + rows)
        # As in one process, negative ids are skipped, and an id that is too large is an error.
        too_large = tf.constant(rows, at.dtype)
        place = tf.where(mine, at - first, tf.where(at < rows * b.batch.total, tf.constant(-1, at.dtype), too_large))
        return b.make(node, [b.replicated(data), place, tf.constant(rows, count.dtype)])[0]

    if not node.after:
        b.register_materializer(node.outputs[0], sharded_only(materializer))
    return made


@rule(*ROW_UPDATES)
def scatter(b: Context, node: Node) -> PlacedOutputs | None:
    """Scatters rows into a table: this rank's part of their width, or this rank's rows."""
    table, indices, updates = node.inputs
    placement = b.placement(table)
    if not isinstance(placement, Sharded):
        return indexing.scatter(b, node) if node.type != SCATTER_UPDATE else None
    if indices.rank is None or updates.rank is None or updates.rank < indices.rank:
        raise Uncertain
    b.all_replicated([each for each in (indices, updates) if not isinstance(b.placement(each), Sharded)])
    if placement.axis:
        shard = placement.at(indices.rank + placement.axis - 1)
        b.make(node, [b.local(table), b.replicated(indices), b.redistributed(updates, shard)])
        return []
    at, rows = b.replicated(indices), b.replicated(updates)
    first, count = _own_range(b, placement)
    mine = tf.where((at >= first) & (at < first + count))
    b.make(node, [b.local(table), tf.gather_nd(at, mine) - first, tf.gather_nd(rows, mine)])
    return []


def _own_range(b: Context, placement: Sharded) -> tuple[int, int]:
    """Returns this rank's first row and number of rows. Raises: Uncertain: they are not contiguous."""
    if placement.blocks != 1:
        raise Uncertain
    count, first = b.local_extent(placement), b.batch.offset
    assert isinstance(count, int) and isinstance(first, int)
    return first * count, count


def own_rows(b: Context, placement: Sharded, at: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns, for each of these rows of a table, whether this rank has it and its place in the shard.

    The place of another rank's row is an arbitrary valid place. A row that no rank has stays out of range, so that
    looking it up fails as in one process.
    """
    first, count = _own_range(b, placement)
    mine = (at >= first) & (at < first + count)
    exists = (at >= 0) & (at < count * b.batch.total)
    outside = tf.constant(-1, at.dtype)
    return mine, tf.where(mine, at - first, tf.where(exists, tf.zeros([], at.dtype), outside))
