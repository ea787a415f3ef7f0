"""Gradients of embedding tables, as one process would have had them from the whole batch.

A gradient lists rows of the table. Where the indices come from the rows of the batch, one process would have listed
those of all ranks, so they are put one after another: Adam and others square the rows of a token that occurs twice one
by one. Where they do not (a table of positions, of relative distances, a whole table as slices), each rank lists the
same indices and one process would have listed them once: the values are added up. Where a program has made the indices
unique, it would have done so for the whole batch: rows of the same index are added up. A table that is used in several
ways has a gradient in several parts, and each is treated for itself. The traced graph tells which is which; in eager
mode, indices that are equal on all ranks are taken for such as do not come from the batch.

A table that is looked up and multiplied, too (the projection of a model with tied embeddings), has a gradient in a
sparse and a dense part. TensorFlow adds these up to a dense tensor, which does not come here. What comes are gradients
of programs that made slices of the dense part, all rows in order ("assumed sparse", Cavdar et al., arXiv 1905.04035):
such a part is not gathered, and where rows may be added up, the others are added to it before anything is sent.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from keras_ddl import communicator, ops
from keras_ddl.communicator.group import Communicator
from keras_ddl.compat import tensorflow as tf_compat
from keras_ddl.compat.tensorflow import tf
from keras_ddl.strategy.row_kinds import INDEPENDENT, RowKinds

_UNIQUE = ("Unique", "UniqueV2", "UniqueWithCounts", "UniqueWithCountsV2")
_PASSES_ON = ("Reshape", "Cast", "Identity")


@dataclass(frozen=True)
class Tables:
    """How the gradients of tables are to be reduced.

    as_dense: True: as whole tables, like any gradient (an optimizer then treats a row that occurs twice as one, which
        is what it does with dense gradients); False: never; "auto": where that is fewer bytes and the same update.
    add_up: rows of the same index may come added up: the optimizer is linear in the gradient. Equal on all ranks.
    kinds: reads the graph; None in eager mode, and where nothing is known of the batch.
    compare: in eager mode, compare the indices over ranks.
    """

    as_dense: bool | str = "auto"
    add_up: bool = False
    kinds: RowKinds | None = None
    compare: bool = True


def all_reduce_slices(
    slices: tf.IndexedSlices, *, op: str, name: str, tables: Tables, comm: Communicator | None = None
) -> tf.IndexedSlices:
    """Reduces `slices` over all ranks.

    Args:
        slices: rows of a table of shape [n, ...], the same on all ranks; each rank may have another number of rows.
        op: "sum" or "mean".
        name: match key, equal on all ranks.
        comm: the ranks; None: all.
    Returns: the rows that one process would have listed, see above; or, if adding up is allowed and there are more than
        twice as many rows as the table has, each row of the table once. The twice is what an all-reduce sends more
        than an all-gather.
    Raises: as `ops.all_reduce`.
    Cost: two all-gathers of the rows, or one all-reduce of those with equal indices, or of the whole table; to decide,
        8 bytes.
    """
    comm = communicator.communicator_of(comm)
    if comm.size == 1:
        return slices
    parts = _parts(slices, tables, name)
    if tables.add_up and tables.as_dense is not False and any(how == "table" for _, _, how in parts):
        rows = _static_rows(slices)
        table = ops.all_reduce(_table(slices, rows), op=op, name=f"{name}/table", comm=comm)
        return tf.IndexedSlices(table, tf.range(rows, dtype=slices.indices.dtype), slices.dense_shape)
    reduced = [
        _reduce_part(values, indices, how, slices, op, f"{name}{i or ''}", tables, comm)
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
    whole: tf.IndexedSlices,
    op: str,
    name: str,
    tables: Tables,
    comm: Communicator,
) -> tf.IndexedSlices:
    part = tf.IndexedSlices(values, indices, whole.dense_shape)
    if how in ("shared", "table"):
        reduced = ops.all_reduce(values, op=op, name=f"{name}/values", comm=comm)
        return tf.IndexedSlices(reduced, indices, whole.dense_shape)
    once = how == "unique"
    if how == "table or rows" and not tables.add_up:
        return _table_or_rows(part, op, name, comm)
    if not (tables.add_up or once) or tables.as_dense is False or whole.dense_shape is None:
        gathered = ops.all_reduce(part, op=op, name=name, comm=comm)
        return _once(gathered) if once else gathered
    return _fewer_bytes(part, op, name, once, comm)


def _fewer_bytes(slices: tf.IndexedSlices, op: str, name: str, once: bool, comm: Communicator) -> tf.IndexedSlices:
    """Gathers the rows or reduces the table. Decided anew in every step, from a number that all ranks share: the rows
    that they have together. Ranks may differ in their own rows, in their batches' shapes and in when they trace.

    `once`: return only rows that occurred, in the order in which one process would have met them.
    """
    table_rows = tf.cast(slices.dense_shape[0], tf.int64)
    rows = ops.all_reduce(tf.size(slices.indices, out_type=tf.int64), op="sum", name=f"{name}/rows", comm=comm)

    def whole_table() -> tuple[tf.Tensor, tf.Tensor]:
        table = ops.all_reduce(_table(slices, table_rows), op=op, name=f"{name}/table", comm=comm)
        if not once:
            return table, tf.cast(tf.range(table_rows), slices.indices.dtype)
        occurred, _ = tf.unique(ops.all_gather(slices.indices, name=f"{name}/occurred", comm=comm))
        return tf.gather(table, occurred), occurred

    def rows_that_occurred() -> tuple[tf.Tensor, tf.Tensor]:
        gathered = ops.all_reduce(slices, op=op, name=name, comm=comm)
        gathered = _once(gathered) if once else gathered
        return gathered.values, gathered.indices

    values, indices = tf.cond(rows > 2 * table_rows, whole_table, rows_that_occurred)
    return tf.IndexedSlices(values, indices, slices.dense_shape)


def _table_or_rows(slices: tf.IndexedSlices, op: str, name: str, comm: Communicator) -> tf.IndexedSlices:
    """Adds up whole tables where all ranks have one, gathers rows otherwise; 4 bytes tell."""
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


def _table(slices: tf.IndexedSlices, rows: Any) -> tf.Tensor:
    """Returns the whole table, with rows of the same index added up."""
    return tf.math.unsorted_segment_sum(slices.values, slices.indices, rows)


def _once(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """Returns each row that occurs once, with those of the same index added up."""
    indices, position = tf.unique(slices.indices)
    values = tf.math.unsorted_segment_sum(slices.values, position, tf.size(indices))
    return tf.IndexedSlices(values, indices, slices.dense_shape)


def _parts(slices: tf.IndexedSlices, tables: Tables, name: str) -> list[tuple[tf.Tensor, tf.Tensor, str]]:
    """Returns [(values, indices, how)]: a gradient by the ways in which its table is used.

    how: "rows", "shared" (the same on all ranks), "unique", "table" (all rows, in order); "table or rows" of a tf.cond,
    in whose branches TensorFlow makes slices of a dense gradient where another branch has slices.
    """
    if tf_compat.is_eager(slices.indices):
        equal = tables.compare and _equal_on_all_ranks(slices.indices, name)
        return [(slices.values, slices.indices, "shared" if equal else "rows")]
    parts: list[tuple[str, list[tf.Tensor]]] = []
    rows = _static_rows(slices)
    for indices in _components(slices.indices):
        how = _origin(indices, rows, tables.kinds)
        if parts and parts[-1][0] == how and how in ("rows", "shared"):  # what is listed once in each part stays apart
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


def _origin(indices: tf.Tensor, rows: int | None, kinds: RowKinds | None) -> str:
    if _is_table(indices, rows):
        return "table"
    if any(_origin(each, rows, None) != "rows" for each in tf_compat.outputs_of_branches(indices)):
        return "table or rows"
    if kinds is None:
        return "rows"
    if kinds.of(indices) == INDEPENDENT:
        return "shared"
    seen, pending = set(), [indices]
    while pending:
        tensor = pending.pop()
        if tensor.op.type in _UNIQUE:
            return "unique"
        if tensor.op.name not in seen:
            seen.add(tensor.op.name)
            pending.extend(tensor.op.inputs)
    return "rows"


def _static_rows(slices: tf.IndexedSlices) -> int | None:
    """Returns the rows of the table, None if the graph does not tell; slices of a tf.cond have their shape from it."""
    if slices.dense_shape is None:
        return None
    if slices.shape.rank and slices.shape[0]:
        return slices.shape[0]
    shapes = [tf_compat.constant_value(each) for each in tf_compat.outputs_of_branches(slices.dense_shape)]
    return next((int(shape[0]) for shape in shapes if shape is not None), None)


def _is_table(indices: tf.Tensor, rows: int | None) -> bool:
    constant = tf_compat.constant_value(indices)
    return bool(rows) and constant is not None and np.array_equal(constant, np.arange(rows))


def _equal_on_all_ranks(indices: Any, name: str) -> bool:
    mine = hashlib.sha256(indices.numpy().tobytes()).digest()
    return len(set(communicator.all_gather_object(mine, name=f"{name}/origin"))) == 1
