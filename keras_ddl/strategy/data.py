"""Each rank's share of the data.

Every rank reads the whole global batch and keeps a contiguous chunk of its rows. So all ranks take the same number of
steps by construction, every row is used exactly once, and nothing has to be agreed per step; the price is that each
rank reads everything. For input that must not be read N times there is `per_rank_dataset`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from keras_ddl import communicator, ops
from keras_ddl.compat import tensorflow as tf_compat
from keras_ddl.compat.tensorflow import tf
from keras_ddl.errors import ConfigError, RankMismatchError

_MARK = "_keras_ddl_rank_share"


def chunk(rows: Any, rank: int, size: int) -> tuple[Any, Any]:
    """Returns (first, end): the rows of a global batch that belong to `rank`.

    Chunks are contiguous and in rank order, differ by at most one row, and the first ranks get more. `rows` is an int
    or an integer tensor; the result is of its kind.
    """
    base, extra = rows // size, rows % size
    least = min if isinstance(rows, int) else tf.minimum
    return base * rank + least(extra, rank), base * (rank + 1) + least(extra, rank + 1)


def take_chunk(value: Any, rank: int, size: int) -> Any:
    """Returns the rows of `rank` of a tensor, tf.SparseTensor or tf.RaggedTensor; what has no rows is returned whole.

    Static row counts are kept: a known number of rows gives a known number of rows.
    """
    if isinstance(value, tf.SparseTensor):
        first, end = chunk(value.dense_shape[0], rank, size)
        start = tf.concat([[first], tf.zeros_like(value.dense_shape[1:])], 0)
        extent = tf.concat([[end - first], value.dense_shape[1:]], 0)
        return tf.sparse.slice(value, start, extent)
    if isinstance(value, tf.RaggedTensor):
        first, end = chunk(value.nrows(), rank, size)
        return value[first:end]
    if not tf.is_tensor(value) or value.shape.rank == 0:
        return value
    rows = value.shape[0] if value.shape.rank else None
    if rows is None:
        rows = tf.shape(value)[0]
    first, end = chunk(rows, rank, size)
    return value[first:end]


def share_dataset(dataset: tf.data.Dataset, rank: int, size: int) -> tf.data.Dataset:
    """Returns `dataset` with each batch cut to the rows of `rank`. COLLECTIVE when the dataset shuffles.

    A dataset that was made from the result of this function is returned as it is.

    Raises:
        ConfigError: batches of fewer rows than ranks; or a shuffle that has no seed, so that the ranks' chunks would
            be chunks of different batches.
        RankMismatchError: the ranks shuffle with different seeds.
    """
    if size == 1 or is_shared(dataset):
        return dataset
    check_batch_rows(static_rows(dataset.element_spec), size, rank, "the dataset's batches")
    check_shuffle_seeds(dataset, rank)

    spec = dataset.element_spec

    def take(*batch):
        leaves = [take_chunk(value, rank, size) for value in tf.nest.flatten(batch)]
        return tf.nest.pack_sequence_as(spec, leaves)

    options = tf.data.Options()
    options.deterministic = True  # else parallel maps give each rank another order of rows
    # In the thread that asks for the batch: taking rows costs microseconds, handing them from thread to thread more.
    shared = dataset.map(take).with_options(options)
    setattr(shared, _MARK, True)
    return shared


def is_shared(dataset: Any) -> bool:
    """Whether `dataset` is, or was made from, the result of `share_dataset`."""
    return any(hasattr(ancestor, _MARK) for ancestor in _ancestors(dataset))


def check_batch_rows(rows: int | None, size: int, rank: int, what: str) -> None:
    """Raises ConfigError when a global batch has fewer rows than there are ranks (None: unknown, not checked)."""
    if rows is not None and rows < size:
        raise ConfigError(
            f"A global batch must have at least one row for each of the {size} ranks. "
            f"Received: {what}: {rows} row(s) (rank {rank}). batch_size counts the rows of all ranks together: use "
            f"batch_size={size} or more, or fewer ranks."
        )


def check_shuffle_seeds(dataset: tf.data.Dataset, rank: int) -> None:
    """Checks that every `.shuffle()` in the dataset gives all ranks one order. COLLECTIVE when there is one."""
    seeds = [tf_compat.shuffle_seeds(d) for d in _ancestors(dataset) if isinstance(d, tf_compat.ShuffleDataset)]
    if not seeds:
        return
    if (0, 0) in seeds:
        raise ConfigError(
            "A dataset that shuffles must shuffle alike on all ranks, because each rank keeps its rows of the same "
            f"batch. Received: a .shuffle() without a seed, made before any seed was set (rank {rank}). Make the "
            "dataset after keras_ddl.Strategy(), call keras.utils.set_random_seed(n) first, or use .shuffle(seed=n)."
        )
    all_seeds = communicator.all_gather_object(seeds, name="keras_ddl/shuffle_seeds")
    for other, theirs in enumerate(all_seeds):
        if theirs != all_seeds[0]:
            raise RankMismatchError(
                "A dataset must shuffle with the same seed on all ranks. "
                f"Received: seeds {all_seeds[0]} on rank 0 and {theirs} on rank {other}. Make the same datasets in "
                "the same order on every rank, or use .shuffle(seed=n)."
            )


def row_count(batch: Any) -> tf.Tensor | None:
    """Returns the rows of this rank's batch (int64 scalar): of its first tensor that has rows; None if none has."""
    for value in tf.nest.flatten(batch):
        if isinstance(value, tf.SparseTensor):
            return tf.cast(value.dense_shape[0], tf.int64)
        if isinstance(value, tf.RaggedTensor):
            return tf.cast(value.nrows(), tf.int64)
        if tf.is_tensor(value) and not isinstance(value, tf.Variable) and value.shape.rank != 0:
            return tf.shape(value, out_type=tf.int64)[0]
        if hasattr(value, "__array__") and getattr(value, "ndim", 0) > 0:
            return tf.constant(len(value), tf.int64)
    return None


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


def per_rank_dataset(dataset_fn: Callable[[Any], tf.data.Dataset], rank: int, size: int) -> PerRankDataset:
    """Returns the dataset that `dataset_fn(tf.distribute.InputContext)` makes for this rank, with agreed length."""
    dataset = dataset_fn(tf_compat.InputContext(size, rank, size))
    return PerRankDataset(dataset)


class PerRankDataset(tf_compat.DistributedDatasetsFromFunction):
    """A dataset of per-rank batches that ends on all ranks at once.

    A rank whose data ends earlier goes on with batches of zero rows, which weigh nothing, until all ranks are done.
    Cost: one all-reduce of 4 bytes per step.
    """

    def __init__(self, dataset: tf.data.Dataset) -> None:
        # Not the parent's: that one builds iterators for many devices. The parent is there for isinstance checks.
        self._dataset = dataset
        setattr(self, _MARK, True)

    @property
    def element_spec(self) -> Any:
        def any_rows(spec):
            shape = getattr(spec, "shape", None)
            if isinstance(spec, tf.TensorSpec) and shape.rank:
                return tf.TensorSpec([None, *shape[1:]], spec.dtype)
            return spec

        return tf.nest.map_structure(any_rows, self._dataset.element_spec)

    def cardinality(self) -> tf.Tensor:
        """Unknown: the other ranks may have more."""
        return tf.data.UNKNOWN_CARDINALITY

    def __iter__(self) -> Iterator[Any]:
        iterator = iter(self._dataset)
        while True:
            element = iterator.get_next_as_optional()
            has_value = bool(element.has_value())
            if not int(ops.all_reduce(tf.constant(int(has_value)), op="max", name="keras_ddl/data/has_value")):
                return
            yield element.get_value() if has_value else _zero_rows(self._dataset.element_spec)


def _zero_rows(spec: Any) -> Any:
    def one(leaf):
        if not isinstance(leaf, tf.TensorSpec) or leaf.shape.rank is None:
            raise ConfigError(
                "distribute_datasets_from_function: ranks with batches of different number need batches of dense "
                f"tensors of known rank. Received: {leaf}. Give every rank the same number of batches (.repeat() and "
                "steps_per_epoch), or dense tensors."
            )
        return tf.zeros([0 if i == 0 else d or 0 for i, d in enumerate(leaf.shape)], leaf.dtype)

    return tf.nest.map_structure(one, spec)


def static_rows(batch: Any) -> int | None:
    """Returns the number of rows of a batch, or of its spec, if it is known before the batch is there."""
    for leaf in tf.nest.flatten(batch):
        if hasattr(leaf, "shape") and not isinstance(leaf, tf.Variable):
            shape = tf.TensorShape(leaf.shape)
            if shape.rank != 0:
                return shape[0] if shape.rank else None
    return None


def _ancestors(dataset: Any) -> list[Any]:
    found, pending = [], [dataset]
    while pending:
        current = pending.pop()
        found.append(current)
        if isinstance(current, tf.data.Dataset):
            pending.extend(tf_compat.dataset_inputs(current))
    return found
