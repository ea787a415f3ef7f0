"""Rows of tensors: which are a rank's, how many there are, and how all ranks' are put together again."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from keras_ddl import communicator, ops
from keras_ddl.compat import tensorflow as tf_compat
from keras_ddl.compat.tensorflow import tf


@dataclass(frozen=True)
class BatchRows:
    """What is known of the batches of a dataset before a step is traced; the same on all ranks.

    Attributes:
        total: rows of each global batch. is_chunked: a rank has those that `chunk` says.
        of_others: which of the flattened components have the rows of another batch (datasets that are zipped).
        is_global: the batches have the rows of all ranks, of which each step takes its rank's.
        spec: the element_spec of the global batches, where each rank reads all of them.
    """

    total: int | None = None
    is_chunked: bool = False
    is_global: bool = False
    of_others: frozenset[int] = frozenset()
    spec: Any = None

    def of_kind(self, specs: Sequence[Any]) -> BatchRows:
        """Returns the same for a kind of batches. `specs`: of their tensors."""
        return dataclasses.replace(self, total=static_rows(list(specs)), spec=None)

    def of_rank(self, components: int, rank: int, size: int) -> list[int | None]:
        """Returns how many rows a rank has of each component, None where that is open."""
        if not self.is_chunked or self.total is None:
            return [None] * components
        first, end = chunk(self.total, rank, size)
        return [None if place in self.of_others else end - first for place in range(components)]


UNKNOWN = BatchRows()


def chunk(rows: Any, rank: int, size: int) -> tuple[Any, Any]:
    """Returns (first, end): the rows of a global batch that belong to `rank`.

    Chunks are contiguous and in rank order, differ by at most one row, and the first ranks get more. `rows` is an int
    or an integer tensor; the result is of its kind.
    """
    base, extra = rows // size, rows % size
    least = min if isinstance(rows, int) else tf.minimum
    return base * rank + least(extra, rank), base * (rank + 1) + least(extra, rank + 1)


def rows_of(value: Any) -> int | tf.Tensor | None:
    """Returns the rows of a dense, sparse or ragged tensor, or of an array; None: it has none.

    A number where it is known, else an int64 scalar.
    """
    rows: tf.Tensor
    if isinstance(value, tf.SparseTensor):
        rows = value.dense_shape[0]
    elif isinstance(value, tf.RaggedTensor):
        rows = value.nrows()
    elif isinstance(value, tf.Tensor):
        if value.shape.rank == 0:
            return None
        known: int | None = value.shape[0] if value.shape.rank else None
        return tf.shape(value, out_type=tf.int64)[0] if known is None else known
    elif hasattr(value, "__array__") and not isinstance(value, tf.Variable) and getattr(value, "ndim", 0) > 0:
        return len(value)
    else:
        return None
    return int(rows) if tf_compat.is_eager(rows) else tf.cast(rows, tf.int64)


def row_count(batch: Any) -> tf.Tensor | None:
    """Returns the rows of this rank's batch (int64 scalar): of its first tensor that has rows; None if none has."""
    rows = next((rows for rows in map(rows_of, tf.nest.flatten(batch)) if rows is not None), None)
    return None if rows is None else tf.cast(rows, tf.int64)


def static_rows(batch: Any) -> int | None:
    """Returns the number of rows of a batch, or of its spec, if it is known before the batch is there."""
    for leaf in tf.nest.flatten(batch):
        if hasattr(leaf, "shape") and not isinstance(leaf, tf.Variable):
            shape = tf.TensorShape(leaf.shape)
            if shape.rank != 0:
                return shape[0] if shape.rank else None
    return None


def with_rows(spec: Any, rows: int | None) -> Any:
    """Returns a type spec of tensors, sparse or ragged ones with another number of rows; what has none as it is."""
    if not isinstance(spec, (tf.TensorSpec, tf.RaggedTensorSpec, tf.SparseTensorSpec)) or not spec.shape.rank:
        return spec
    shape = [rows, *spec.shape[1:]]
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec(shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype)
    return type(spec)(shape, spec.dtype)


def global_batch(batch: Any, total: int | None) -> Any:
    """Returns type specs of the global batch, `total` rows of every tensor, in the structure of a rank's part of it.

    batch: tensors, arrays, or type specs of them.
    """
    return tf.nest.map_structure(lambda leaf: _spec_with_rows(leaf, total), batch)


def _spec_with_rows(leaf: Any, total: int | None) -> Any:
    if not isinstance(leaf, tf.TypeSpec):
        if isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor)):
            leaf = tf.type_spec_from_value(leaf)
        elif hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
            leaf = tf.TensorSpec(leaf.shape, leaf.dtype)
        elif hasattr(leaf, "__array__"):
            array = leaf.__array__()
            leaf = tf.TensorSpec(array.shape, array.dtype)
        else:
            return None if isinstance(leaf, tf.experimental.Optional) else leaf
    return with_rows(leaf, total)


def total_rows(batch: Any) -> int | None:
    """Returns the rows of all ranks' parts of a batch; None if a rank has no tensor with rows. COLLECTIVE."""
    rows = row_count(batch)
    gathered = communicator.all_gather_object(None if rows is None else int(rows), name="keras_ddl/on_batch/rows")
    return None if None in gathered else sum(gathered)


def take_chunk(value: Any, rank: int, size: int) -> Any:
    """Returns the rows of `rank` of a tensor, tf.SparseTensor or tf.RaggedTensor; what has no rows as it is.

    Static row counts are kept: a known number of rows gives a known number of rows.
    """
    rows = rows_of(value) if tf.is_tensor(value) else None
    if rows is None:
        return value
    first, end = chunk(rows, rank, size)
    if isinstance(value, tf.SparseTensor):
        others = value.dense_shape[1:]
        start = tf.concat([[tf.cast(first, tf.int64)], tf.zeros_like(others)], 0)
        return tf.sparse.slice(value, start, tf.concat([[tf.cast(end - first, tf.int64)], others], 0))
    if isinstance(value, tf.Tensor) and tf.executing_eagerly():  # as below, in a seventh of the time
        return tf.raw_ops.StridedSlice(input=value, **_slice_of_rows(first, end))
    return value[first:end]


@functools.lru_cache(maxsize=64)
def _slice_of_rows(first: int, end: int) -> dict[str, tf.Tensor]:
    return {name: tf.constant([bound]) for name, bound in (("begin", first), ("end", end), ("strides", 1))}


def gather_rows(value: Any, rank: int, *, name: str) -> Any:
    """Returns the rows of all ranks in rank order: a tensor, tf.SparseTensor or tf.RaggedTensor.

    A scalar gives a vector with one element per rank; bool travels as uint8.
    Raises: RankMismatchError: the ranks' rows differ in shape or dtype.
    """
    if isinstance(value, tf.RaggedTensor):
        lengths = [
            ops.all_gather(length, name=f"{name}/lengths_{level}")
            for level, length in enumerate(value.nested_row_lengths())
        ]
        return tf.RaggedTensor.from_nested_row_lengths(
            gather_rows(value.flat_values, rank, name=f"{name}/values"), lengths
        )
    if isinstance(value, tf.SparseTensor):
        shapes = ops.all_gather(value.dense_shape[tf.newaxis], name=f"{name}/shapes")
        before = tf.reduce_sum(shapes[:rank, 0])
        offset = tf.one_hot(0, tf.size(value.dense_shape), on_value=before, off_value=tf.zeros_like(before))
        shape = tf.concat([[tf.reduce_sum(shapes[:, 0])], tf.reduce_max(shapes[:, 1:], axis=0)], 0)
        return tf.SparseTensor(
            ops.all_gather(value.indices + offset, name=f"{name}/indices"),
            gather_rows(value.values, rank, name=f"{name}/values"),
            shape,
        )
    value = tf.convert_to_tensor(value)
    if value.dtype == tf.bool:
        return tf.cast(ops.all_gather(tf.cast(value, tf.uint8), name=name), tf.bool)
    return ops.all_gather(value, name=name)


def chunked_rows(spec: Any) -> BatchRows:
    """Returns what the element_spec of global batches, of which each rank keeps its chunk, tells of their rows."""
    total = static_rows(spec)
    rows = [static_rows(leaf) for leaf in tf.nest.flatten(spec)]
    others = frozenset(place for place, each in enumerate(rows) if each not in (None, total))
    return BatchRows(total, is_chunked=True, of_others=others, spec=spec)
