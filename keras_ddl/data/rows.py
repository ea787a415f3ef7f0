"""Rows of tensors: divides them between ranks, counts them, and gathers those of all ranks."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from keras_ddl import communicator, ops
from keras_ddl.compat import tensorflow as tf_compat
from keras_ddl.compat.tensorflow import tf


@dataclass(frozen=True)
class BatchRows:
    """Facts about the batches of a dataset, known before a step is traced and equal on all ranks.

    Attributes:
        total: rows of each global batch.
        is_chunked: a rank has the rows that `chunk` assigns to it.
        others: which flattened components have another number of rows than the batch (from zipped datasets), grouped by
            number.
        may_differ: only reading a batch shows whether there are such components (`row_totals_and_outliers`).
        is_global: the batches have the rows of all ranks, and each step takes its rank's rows.
        all_can_read: every rank is able to read the rows of all ranks.
        spec: the element_spec of the global batches, if each rank reads all of them.
    """

    total: int | None = None
    is_chunked: bool = False
    is_global: bool = False
    all_can_read: bool = False
    others: tuple[frozenset[int], ...] = ()
    spec: Any = None
    may_differ: bool = False

    @property
    def other_components(self) -> frozenset[int]:
        """The components that have another number of rows than the batch."""
        return frozenset().union(*self.others)

    def for_kind(self, specs: Sequence[Any]) -> BatchRows:
        """Returns the facts about one kind of batches. `specs`: type specs of their tensors."""
        places: Sequence[int] = range(len(specs))
        if self.spec is not None:
            places = [place for place, leaf in enumerate(tf.nest.flatten(self.spec)) if is_spec_of_tensor(leaf)]
        shared = [spec for place, spec in zip(places, specs) if place not in self.other_components]
        return dataclasses.replace(self, total=static_rows(shared), spec=None, may_differ=False)

    def rows_of_rank(self, components: int, rank: int, size: int) -> list[int | None]:
        """Returns the number of a rank's rows of each component; None: unknown."""
        if not self.is_chunked or self.total is None:
            return [None] * components
        first, end = chunk(self.total, rank, size)
        return [None if place in self.other_components else end - first for place in range(components)]

    def learn(self, counts: Sequence[Sequence[int | None]]) -> BatchRows:
        """Returns the same, completed by the rows of a batch. `counts`: rows of each component on each rank."""
        return dataclasses.replace(self, others=row_totals_and_outliers(counts, self.spec)[1], may_differ=False)


UNKNOWN = BatchRows()


def chunk(rows: Any, rank: int, size: int) -> tuple[Any, Any]:
    """Returns (first, end): the rows of a global batch that belong to `rank`.

    Chunks are contiguous and in rank order, differ by at most one row, and the first ranks get more. `rows` is an int
    or an integer tensor, and so are the results.
    """
    base, extra = rows // size, rows % size
    least = min if isinstance(rows, int) else tf.minimum
    return base * rank + least(extra, rank), base * (rank + 1) + least(extra, rank + 1)


def rows_of(value: Any) -> int | tf.Tensor | None:
    """Returns the rows of a dense, sparse or ragged tensor, or of an array; None if it has no rows.

    An int if the number is known, else an int64 scalar.
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


def row_count(batch: Any, left_out: Collection[int] = ()) -> tf.Tensor | None:
    """Returns the number of rows of this rank's batch (int64 scalar), from its first tensor with rows, or None.

    left_out: components that are not counted.
    """
    leaves = [leaf for place, leaf in enumerate(tf.nest.flatten(batch)) if place not in left_out]
    rows = next((rows for rows in map(rows_of, leaves) if rows is not None), None)
    return None if rows is None else tf.cast(rows, tf.int64)


def static_rows(batch: Any) -> int | None:
    """Returns the number of rows of a batch, or of its spec, if it is known before the batch is read."""
    for leaf in tf.nest.flatten(batch):
        if hasattr(leaf, "shape") and not isinstance(leaf, tf.Variable):
            shape = tf.TensorShape(leaf.shape)
            if shape.rank != 0:
                return shape[0] if shape.rank else None
    return None


def with_rows(spec: Any, rows: int | None) -> Any:
    """Returns a dense, sparse or ragged tensor's type spec with another number of rows; without rows, unchanged."""
    if not isinstance(spec, (tf.TensorSpec, tf.RaggedTensorSpec, tf.SparseTensorSpec)) or not spec.shape.rank:
        return spec
    shape = [rows, *spec.shape[1:]]
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec(shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype)
    return type(spec)(shape, spec.dtype)


def global_batch(batch: Any, total: int | Sequence[int | None] | None) -> Any:
    """Returns type specs of the global batch in the structure of a rank's part of it.

    Args:
        batch: tensors, arrays, or type specs of them.
        total: the rows of every tensor, or of each component.
    """
    leaves = tf.nest.flatten(batch)
    totals = total if isinstance(total, Sequence) else [total] * len(leaves)
    return tf.nest.pack_sequence_as(batch, [_spec_with_rows(*each) for each in zip(leaves, totals)])


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


def counts_of_ranks(batch: Any) -> list[list[int | None]]:
    """Returns how many rows each component of a batch has on each rank. COLLECTIVE."""
    return communicator.all_gather_object(component_rows(batch), name="keras_ddl/on_batch/rows")


def component_rows(batch: Any) -> list[int | None]:
    """Returns, outside of a graph, how many rows each component of a batch has; None: the component has no rows."""
    return [None if each is None else int(each) for each in map(rows_of, tf.nest.flatten(batch))]


def row_totals_and_outliers(
    counts: Sequence[Sequence[int | None]], structure: Any = None
) -> tuple[list[int | None], tuple[frozenset[int], ...]]:
    """Returns each component's rows over all ranks, and the components whose rows differ from the batch's, by count.

    The batch has the number of rows that occurs in most elements of the structure (x, y, sample_weight). On a tie, the
    first element decides.

    Args:
        counts: rows of each component on each rank, equal on all ranks; None: a component without rows.
        structure: the batch, or its specs; None: each component is an element.
    """
    columns = [tuple(column) for column in zip(*counts)]
    totals = [None if None in column else sum(each or 0 for each in column) for column in columns]
    alike: dict[tuple[int | None, ...], set[int]] = {}
    for place, column in enumerate(columns):
        if totals[place] is not None:
            alike.setdefault(column, set()).add(place)
    elements = list(range(len(columns)))
    if isinstance(structure, (tuple, list)):
        elements = [number for number, element in enumerate(structure) for _ in tf.nest.flatten(element)]
    elif structure is not None:
        elements = [0] * len(columns)
    votes = {column: len({elements[place] for place in places}) for column, places in alike.items()}
    batch_column = max(votes, key=votes.__getitem__, default=None)  # the first one on a tie
    return totals, tuple(frozenset(places) for column, places in alike.items() if column != batch_column)


def take_chunk(value: Any, rank: int, size: int) -> Any:
    """Returns the rows of `rank` from a dense, sparse or ragged tensor; a value without rows stays unchanged.

    If the number of rows is static, the result's number is also static.
    """
    rows = rows_of(value) if tf.is_tensor(value) else None
    if rows is None:
        return value
    first, end = chunk(rows, rank, size)
    if isinstance(value, tf.SparseTensor):
        others = value.dense_shape[1:]
        start = tf.concat([[tf.cast(first, tf.int64)], tf.zeros_like(others)], 0)
        return tf.sparse.slice(value, start, tf.concat([[tf.cast(end - first, tf.int64)], others], 0))
    if isinstance(value, tf.Tensor) and tf.executing_eagerly():  # the same as below, in a seventh of the time
        return tf.raw_ops.StridedSlice(input=value, **_slice_of_rows(first, end))
    return value[first:end]


@functools.lru_cache(maxsize=64)
def _slice_of_rows(first: int, end: int) -> dict[str, tf.Tensor]:
    return {name: tf.constant([bound]) for name, bound in (("begin", first), ("end", end), ("strides", 1))}


def gather_rows(value: Any, rank: int, *, name: str) -> Any:
    """Returns the rows of all ranks in rank order: a tensor, tf.SparseTensor or tf.RaggedTensor.

    Scalars become a vector with one element per rank; bool is sent as uint8.
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


def is_spec_of_tensor(leaf: Any) -> bool:
    """Whether a leaf of an element_spec describes a tensor. Keras passes None through tf.data as an optional."""
    return isinstance(leaf, tf.TypeSpec) and not isinstance(leaf, tf.OptionalSpec)


def chunked_rows(spec: Any, *, may_differ: bool = False) -> BatchRows:
    """Returns the facts about rows that an element_spec of global batches shows; a rank keeps its chunk of the rows.

    may_differ: whether components may have different numbers of rows, judging by their source.
    """
    rows = [static_rows(leaf) for leaf in tf.nest.flatten(spec) if is_spec_of_tensor(leaf) and leaf.shape.rank != 0]
    known = [each for each in rows if each is not None]
    is_open = len(known) < len(rows)
    numbers = list(map(static_rows, tf.nest.flatten(spec)))
    total = static_rows(spec)
    if not is_open:
        unlike = frozenset().union(*row_totals_and_outliers([numbers], spec)[1])
        total = next((each for place, each in enumerate(numbers) if each is not None and place not in unlike), None)
    alike: dict[int, set[int]] = {}
    for place, number in enumerate(numbers):
        if number is not None and number != total:
            alike.setdefault(number, set()).add(place)
    others = tuple(map(frozenset, alike.values()))
    may_differ = may_differ and is_open and len(rows) > 1
    return BatchRows(total, is_chunked=True, others=others, spec=spec, may_differ=may_differ)
