"""Gradients of embedding tables: only the rows that occurred, or the whole table, whichever is fewer bytes.

The rows of all ranks together grow with the batch and the number of ranks; a table does not. Which is fewer is decided
anew in every step, from a number that all ranks share: the rows that they have together. Ranks may differ in their own
rows, in their batches' shapes and in when they trace a step, so nothing that a rank knows alone would do.
"""

from __future__ import annotations

from keras_ddl import communicator, ops
from keras_ddl.compat.tensorflow import tf


def all_reduce_slices(slices: tf.IndexedSlices, *, op: str, name: str, add_up: bool) -> tf.IndexedSlices:
    """Reduces `slices` over all ranks.

    Args:
        slices: rows of a table of shape [n, ...], the same on all ranks; each rank may have another number of rows.
        op: "sum" or "mean".
        name: match key, equal on all ranks.
        add_up: rows of the same index may come added up; equal on all ranks. Not for optimizers that are not linear in
            the gradient: Adam squares row by row.
    Returns: the rows of all ranks one after another; or, if `add_up` and there are more than twice as many rows as the
        table has, each row of the table once. The twice is what an all-reduce sends more than an all-gather.
    Raises: as `ops.all_reduce`.
    Cost: two all-gathers of the rows; with `add_up` 8 bytes, and these or one all-reduce of the table.
    """
    if not add_up or slices.dense_shape is None or communicator.size() == 1:
        return ops.all_reduce(slices, op=op, name=name)
    table_rows = tf.cast(slices.dense_shape[0], tf.int64)
    rows = ops.all_reduce(tf.size(slices.indices, out_type=tf.int64), op="sum", name=f"{name}/rows")

    def whole_table() -> tuple[tf.Tensor, tf.Tensor]:
        table = tf.math.unsorted_segment_sum(slices.values, slices.indices, table_rows)
        return ops.all_reduce(table, op=op, name=f"{name}/table"), tf.cast(tf.range(table_rows), slices.indices.dtype)

    def rows_that_occurred() -> tuple[tf.Tensor, tf.Tensor]:
        gathered = ops.all_reduce(slices, op=op, name=name)
        return gathered.values, gathered.indices

    values, indices = tf.cond(rows > 2 * table_rows, whole_table, rows_that_occurred)
    return tf.IndexedSlices(values, indices, slices.dense_shape)
