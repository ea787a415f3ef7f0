"""Gradients of embedding tables that each rank has made from its own rows, reduced over ranks.

A gradient lists rows of the table. Where the indices come from the rows of the batch, one process would have listed
those of all ranks, so they are put one after another: Adam and others square the rows of a token that occurs twice one
by one. A table that is used in several ways has a gradient in several parts, and each is treated for itself. In eager
mode, indices that are equal on all ranks are taken for such as do not come from the batch (a table of positions): one
process would have listed them once, and the values are added up. This is for loops of strategy.run and other front
ends: a step that sees the global batch is cut, table and all (keras_ddl/cut).

A table that is both looked up and multiplied (the projection of a model with tied embeddings) has a gradient in a
sparse and a dense part. TensorFlow adds these up to a dense tensor, which does not come here. What comes are gradients
of programs that made slices of the dense part, all rows in order ("assumed sparse", Cavdar et al., arXiv 1905.04035):
such a part is not gathered.
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
        slices: rows of a table of shape [n, ...], the same on all ranks; each rank may have another number of rows.
        op: "sum" or "mean".
        name: match key, equal on all ranks.
        compare: in eager mode, compare the indices over ranks.
        comm: the ranks; None: all.
    Returns: the rows that one process would have listed, see above.
    Raises: as `ops.all_reduce`.
    Cost: two all-gathers of the rows, or one all-reduce of those with equal indices.
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
    """Adds up tables where all ranks have all rows of one, gathers rows otherwise; 4 bytes tell."""
    every_row = tf.range(tf.cast(slices.dense_shape[0], slices.indices.dtype))
    is_table = tf.cond(
        tf.equal(tf.size(slices.indices), tf.size(every_row)),
        lambda: tf.reduce_all(slices.indices == every_row),
        lambda: False,
    )
    all_are = ops.all_reduce(tf.cast(is_table, tf.int32), op="min", name=f"{name}/is_table", comm=comm)

    def added_up() -> tuple[tf.Tensor, tf.Tensor]:
        return ops.all_reduce(slices.values, op=op, name=f"{name}/table", comm=comm), slices.indices

    def gathered() -> tuple[tf.Tensor, tf.Tensor]:
        rows = ops.all_reduce(slices, op=op, name=name, comm=comm)
        return rows.values, rows.indices

    values, indices = tf.cond(tf.cast(all_are, tf.bool), added_up, gathered)
    return tf.IndexedSlices(values, indices, slices.dense_shape)


def _parts(slices: tf.IndexedSlices, compare: bool, name: str) -> list[tuple[tf.Tensor, tf.Tensor, str]]:
    """Returns [(values, indices, how)]: a gradient by the ways in which its table is used.

    how: "rows", "shared" (the same on all ranks, in eager mode), "table" (all rows, in order); "table or rows" of a
    tf.cond, in whose branches TensorFlow makes slices of a dense gradient where another branch has slices.
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
    """The indices that a tape has put one after another, because a table is used several times."""
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
    """Returns the rows of the table, None if the graph does not tell; slices of a tf.cond have their shape from it."""
    if slices.dense_shape is None:
        return None
    if slices.shape.rank and slices.shape[0]:
        return int(slices.shape[0])
    shapes = [tf_compat.constant_value(each) for each in tf_compat.outputs_of_branches(slices.dense_shape)]
    return next((int(shape[0]) for shape in shapes if shape is not None), None)


def _is_table(indices: tf.Tensor, rows: int | None) -> bool:
    constant = tf_compat.constant_value(indices)
    return rows is not None and rows > 0 and constant is not None and np.array_equal(constant, np.arange(rows))
