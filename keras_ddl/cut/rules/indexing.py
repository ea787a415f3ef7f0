"""Sums by index, of a value or into a variable, such as the gradients of embeddings."""

from __future__ import annotations

from keras_ddl.compat import tensorflow as tf_compat
from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.analysis.dims import Dim, if_certain, number_of
from keras_ddl.cut.analysis.extents import Dims
from keras_ddl.cut.analysis.placements import PARTIAL, REPLICATED, Partial, PlacedOutputs, Sharded
from keras_ddl.cut.analysis.program import Node
from keras_ddl.cut.analysis.variable_ops import ASSIGN_ADD, ASSIGN_SUB, SCATTER_ADD
from keras_ddl.cut.operations import segments
from keras_ddl.cut.operations.context import Context
from keras_ddl.cut.operations.registry import rule
from keras_ddl.cut.shards.table_rows import USUAL_BYTES, is_added_to_a_part, sharding_of_rows
from keras_ddl.cut.values.collectives import COMBINED_DTYPES

_FEWER_BYTES = "gradients of a table's rows, fewer bytes than the table"


@rule(*(each for each in segments.COMBINING if each != "UnsortedSegmentSum"))
def combine(b: Context, node: Node) -> PlacedOutputs | None:
    return segments.combine(b, node)


@rule("UnsortedSegmentSum")
def segment_sum(b: Context, node: Node) -> PlacedOutputs | None:
    """Adds up each rank's own rows by index, which gives parts. Gathers the rows instead if that moves fewer bytes.

    If rows are sharded along their width, each rank adds up its part of the width of all rows.
    """
    of_own_rows = if_certain(segments.combine, b, node)
    if of_own_rows is not None:
        return of_own_rows
    data, ids, count = node.inputs
    width = b.placement(data)
    if isinstance(width, Sharded) and ids.rank is not None and width.axis >= ids.rank:
        b.all_replicated([ids, count])
        tensors = [b.local(data), b.replicated(ids), b.replicated(count)]
        return [(b.make(node, tensors)[0], width.at(width.axis - ids.rank + 1))]
    placement, dims = sharding_of_rows(b, ids, data), b.dims(data)
    if placement is None or b.placement(count) != REPLICATED:
        return None
    table = node.outputs[0]
    if not _is_cheaper_summed(dims, if_certain(b.dims, table), data.dtype) and not is_added_to_a_part(b, table):
        b.report.intends_gather(node, _FEWER_BYTES)
        return None
    data, ids = b.redistributed(data, placement), b.redistributed(ids, placement)
    return [(b.make(node, [data, ids, b.replicated(count)])[0], PARTIAL)]


def scatter(b: Context, node: Node) -> PlacedOutputs | None:
    """Adds rows to a replicated variable. Gathers the rows, or sums a table of sums if that moves fewer bytes."""
    variable, indices, updates = node.inputs
    placement, shape = sharding_of_rows(b, indices, updates), tf_compat.variable_shape(variable.tensor)
    dims, at = b.dims(updates), b.dims(indices)
    if placement is None or shape is None or not shape.is_fully_defined() or b.in_loop:
        return None
    if len(dims) != len(at) + shape.rank - 1 or updates.dtype not in COMBINED_DTYPES:
        return None
    if not _is_cheaper_summed(dims, tuple(map(Dim, shape)), updates.dtype):
        b.report.intends_gather(node, _FEWER_BYTES)
        return None
    b.all_replicated([each for each in (indices, updates) if isinstance(b.placement(each), Partial)])

    def part() -> tf.Tensor:
        shards = b.redistributed(updates, placement), b.redistributed(indices, placement)
        return tf.math.unsorted_segment_sum(*shards, shape[0])

    kind = ASSIGN_ADD if node.type == SCATTER_ADD else ASSIGN_SUB
    b.assign(kind, b.replicated(variable), b.sum_over_ranks(node, part))
    return []


def _is_cheaper_summed(rows: Dims, table: Dims | None, dtype: tf.DType) -> bool:
    """Whether sending a table of sums takes fewer bytes than sending the rows to be summed.

    A sum over ranks sends its bytes twice; gathered rows are sent once. For open extents, a typical batch is assumed.
    """
    size, gathered = number_of(table) if table is not None else None, number_of(rows)
    return size is None or 2 * size < (gathered if gathered is not None else USUAL_BYTES // dtype.size)
