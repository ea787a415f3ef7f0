"""Rows written to tables of variables, as optimizers do with gradients of embeddings."""

from __future__ import annotations

from typing import Any

from keras_ddl.compat import tensorflow as tf_compat
from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.collectives import COMBINED_DTYPES
from keras_ddl.cut.context import Context
from keras_ddl.cut.dims import Dim
from keras_ddl.cut.placements import Partial, Sharded
from keras_ddl.cut.program import Node
from keras_ddl.cut.registry import rule
from keras_ddl.cut.rules.indexing import FEWER_BYTES, is_cheaper_summed


@rule("ResourceScatterAdd", "ResourceScatterSub")
def scatter(b: Context, node: Node) -> Any:
    """Rows added to those of a variable: where that is fewer bytes, a table of sums is, which ranks sum."""
    variable, indices, updates = node.inputs
    rows = next((b.placement(each) for each in (updates, indices) if isinstance(b.placement(each), Sharded)), None)
    shape, dims, at = tf_compat.variable_shape(variable.tensor), b.dims(updates), b.dims(indices)
    if rows is None or shape is None or not shape.is_fully_defined() or None in (dims, at) or b.in_loop:
        return None
    if rows.axis >= len(at) or len(dims) != len(at) + shape.rank - 1 or updates.dtype not in COMBINED_DTYPES:
        return None
    if not b.can_shard(indices, rows) or not b.can_shard(updates, rows):
        return None
    if not is_cheaper_summed(dims, [*map(Dim, shape)], updates.dtype):
        b.report.intends_gather(node, FEWER_BYTES)
        return None
    b.all_replicated([each for each in (indices, updates) if isinstance(b.placement(each), Partial)])

    def part() -> tf.Tensor:
        return tf.math.unsorted_segment_sum(b.sharded(updates, rows), b.sharded(indices, rows), shape[0])

    kind = "AssignAddVariableOp" if node.type == "ResourceScatterAdd" else "AssignSubVariableOp"
    b.assign(kind, b.replicated(variable), b.sum_over_ranks(node, part))
    return []
