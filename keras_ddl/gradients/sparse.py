"""Reduces sparse gradients of embedding tables that the ranks have computed from their own rows of the batch.

Such a gradient lists rows of the table. If the indices come from the batch, one process would have listed the rows of
all ranks, so the ranks' rows are concatenated: Adam and others square each occurrence of a token separately. A table
that is used in several ways has a gradient in several parts, and each part is reduced separately. In eager mode,
indices that are equal on all ranks are assumed not to come from the batch (a table of positions): one process would
have listed them once, so the values are summed. This module serves loops of strategy.run and other front ends. In a
step that sees the global batch, tables are cut like everything else (keras_ddl/cut).

A table that is both looked up and multiplied (the projection of a model with tied embeddings) has a gradient with a
sparse and a dense part. TensorFlow adds these to a dense tensor, which is not reduced here. But programs may convert
the dense part to slices of all rows in order ("assumed sparse", Cavdar et al., arXiv 1905.04035): these are summed, not
gathered.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from keras_ddl import communicator, ops
from keras_ddl.communicator.comparison import is_equal
from keras_ddl.communicator.group import Communicator
from keras_ddl.compat import tensorflow as tf_compat
from keras_ddl.compat.tensorflow import tf

_PASSES_ON = ("Reshape", "Cast", "Identity")


def all_reduce_slices(
    slices: tf.IndexedSlices, *, op: str, name: str, compare: bool = True, comm: Communicator | None = None
) -> tf.IndexedSlices:
    """Reduces `slices` over all ranks.

    Args:
        slices: rows of a table, whose shape [n, ...] is equal on all ranks; the number of rows may differ.
        op: "sum" or "mean".
        name: match key, equal on all ranks.
        compare: in eager mode, compare the indices over ranks.
        comm: the ranks; None for all.
    Returns: the rows that one process would have listed; see above.
    Raises: as `ops.all_reduce`.
    Cost: two all-gathers of the rows, or one all-reduce if indices are equal.
    """
    comm = communicator.communicator_of(comm)
    if comm.size == 1:
        return slices
    parts = _parts(slices, compare, name)
    reduced = [
        _reduce_part(values, indices, how, slices, op, f"{name}{i or ''}", comm)
        for i, (values, indices, how) in enumerate(parts)
    ]
    if len(reduced) == 1:
        return reduced[0]
    return tf.IndexedSlices(
        tf.concat([each.values for each in reduced], 0),
        tf.concat([tf.cast(each.indices, slices.indices.dtype) for each in reduced], 0),
        slices.dense_shape,
    )


def _reduce_part(
    values: tf.Tensor,
    indices: tf.Tensor,
    how: str,
    table: tf.IndexedSlices,
    op: str,
    name: str,
    comm: Communicator,
) -> tf.IndexedSlices:
    part = tf.IndexedSlices(values, indices, table.dense_shape)
    if how in ("shared", "table"):
        reduced = ops.all_reduce(values, op=op, name=f"{name}/values", comm=comm)
        return tf.IndexedSlices(reduced, indices, table.dense_shape)
    if how == "table or rows":
        return _table_or_rows(part, op, name, comm)
    return ops.all_reduce(part, op=op, name=name, comm=comm)


def _table_or_rows(slices: tf.IndexedSlices, op: str, name: str, comm: Communicator) -> tf.IndexedSlices:
    """Sums the values if the slices of all ranks are complete tables, else gathers the rows; decided at run time."""
    every_row = tf.range(tf.cast(slices.dense_shape[0], slices.indices.dtype))
    is_table = tf.cond(
        tf.equal(tf.size(slices.indices), tf.size(every_row)),
        lambda: tf.reduce_all(slices.indices == every_row),
        lambda: False,
    )
    all_are = ops.all_reduce(tf.cast(is_table, tf.int32), op="min", name=f"{name}/is_table", comm=comm)

    def summed() -> tuple[tf.Tensor, tf.Tensor]:
        return ops.all_reduce(slices.values, op=op, name=f"{name}/table", comm=comm), slices.indices

    def gathered() -> tuple[tf.Tensor, tf.Tensor]:
        rows = ops.all_reduce(slices, op=op, name=name, comm=comm)
        return rows.values, rows.indices

    values, indices = tf.cond(tf.cast(all_are, tf.bool), summed, gathered)
    return tf.IndexedSlices(values, indices, slices.dense_shape)


def _parts(slices: tf.IndexedSlices, compare: bool, name: str) -> list[tuple[tf.Tensor, tf.Tensor, str]]:
    """Splits a gradient by the uses of its table into [(values, indices, how)].

    how: "rows"; "shared" (equal on all ranks, in eager mode); "table" (all rows, in order); "table or rows" for a
    tf.cond, in which TensorFlow converts a branch's dense gradient to slices if another branch has slices.
    """
    if tf_compat.is_eager(slices.indices):
        equal = compare and is_equal(slices.indices.numpy().tobytes(), f"{name}/origin")
        return [(slices.values, slices.indices, "shared" if equal else "rows")]
    parts: list[tuple[str, list[tf.Tensor]]] = []
    rows = _static_rows(slices)
    for indices in _components(slices.indices):
        how = _origin(indices, rows)
        if parts and parts[-1][0] == how == "rows":
            parts[-1][1].append(indices)
        else:
            parts.append((how, [indices]))
    if len(parts) == 1:
        return [(slices.values, slices.indices, parts[0][0])]
    sizes = [tf.add_n([tf.size(each) for each in some]) for _, some in parts]
    values = tf.split(slices.values, sizes)
    return list(zip(values, tf.split(slices.indices, sizes), [how for how, _ in parts]))


def _components(indices: tf.Tensor) -> Sequence[tf.Tensor]:
    """Returns the separate indices that a tape has concatenated because a table is used several times."""
    operation = indices.op
    if operation.type in _PASSES_ON:
        return _components(operation.inputs[0]) if operation.inputs[0].op.type == "ConcatV2" else [indices]
    if operation.type != "ConcatV2" or indices.shape.rank != 1:
        return [indices]
    return [part for each in operation.inputs[:-1] for part in _components(each)]


def _origin(indices: tf.Tensor, rows: int | None) -> str:
    if _is_table(indices, rows):
        return "table"
    if any(_origin(each, rows) != "rows" for each in tf_compat.outputs_of_branches(indices)):
        return "table or rows"
    return "rows"


def _static_rows(slices: tf.IndexedSlices) -> int | None:
    """Returns the number of rows of the table; None if the graph does not show it. Looks into branches of a tf.cond."""
    if slices.dense_shape is None:
        return None
    if slices.shape.rank and slices.shape[0]:
        return int(slices.shape[0])
    shapes = [tf_compat.constant_value(each) for each in tf_compat.outputs_of_branches(slices.dense_shape)]
    return next((int(shape[0]) for shape in shapes if shape is not None), None)


def _is_table(indices: tf.Tensor, rows: int | None) -> bool:
    constant = tf_compat.constant_value(indices)
    return rows is not None and rows > 0 and constant is not None and np.array_equal(constant, np.arange(rows))
