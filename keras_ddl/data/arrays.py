"""Reads this rank's rows of the arrays of fit, evaluate and predict, and checks that all ranks have the same arrays."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np

from keras_ddl import communicator
from keras_ddl.communicator.comparison import digest, is_equal, other_rank, require_equal_values
from keras_ddl.communicator.newcomers import history
from keras_ddl.communicator.reporting import stack_position
from keras_ddl.compat.keras import array_slicing, keras, tree
from keras_ddl.compat.tensorflow import do_not_convert, tf
from keras_ddl.data import order
from keras_ddl.data.rows import BatchRows, chunk
from keras_ddl.data.share import LET_RANK_0_READ, marked, share_dataset
from keras_ddl.data.untuned import untuned
from keras_ddl.errors import RankMismatchError

_RULE = "Every rank must have all the data, in the same order: keras_ddl takes each rank's rows of every batch."
_REMEDY = (
    "Shuffle and draw random numbers with the same seed on all ranks: call keras.utils.set_random_seed(n) first, or "
    f"make the data after keras_ddl.Strategy(). {LET_RANK_0_READ} If the data is already split between ranks, use "
    "strategy.distribute_datasets_from_function."
)
_ROWS, _VALUES = 1024, 32  # the largest number of rows, and of values in a row, that are compared
_batches_compared = False

Shuffle = Callable[[tf.Tensor], tf.Tensor]


def dataset_of_rows(
    inputs: Any,
    rank: int,
    size: int,
    number: int,
    *,
    batch_size: int,
    shuffle: bool | str,
    shuffle_rows: Shuffle,
) -> tf.data.Dataset:
    """Returns the batches of Keras's ArrayDataAdapter, reduced to the rows of `rank`.

    Row positions are shuffled and batched as in Keras (with the same operations in separate functions, so that
    TensorFlow draws the same numbers), and each rank takes its positions before it looks up any rows.

    Args:
        inputs: the adapter's arrays, with `batch_size` and `shuffle` (False, True or "batch") as passed to fit.
        number: the number of the dataset, as in `share_dataset`.
        shuffle_rows: tf.random.shuffle or a replacement.
    """
    rows = next(array.shape[0] for array in tree.flatten(inputs) if array is not None)
    cut = _shuffled_within_batches if shuffle == "batch" else _shuffled_whole if shuffle else _in_order
    mine = cut(rows, batch_size, rank, size, number, shuffle_rows)
    arrays = tree.lists_to_tuples(array_slicing.convert_to_sliceable(inputs, target_backend="tensorflow"))

    @do_not_convert
    def look_up(positions: tf.Tensor, arrays: Any) -> Any:
        def one(array: Any) -> Any:
            if isinstance(array, array_slicing.TensorflowSparseWrapper):
                return array_slicing.slice_tensorflow_sparse_wrapper(array, positions)
            if isinstance(array, (list, tuple, dict)):
                return None  # traverse its elements
            return tf.gather(array, positions) if tf.is_tensor(array) else array

        return tree.traverse(one, arrays)

    # One thread reads ahead of the steps: handing rows to more threads costs more than gathering them.
    dataset = tf.data.Dataset.zip((mine, tf.data.Dataset.from_tensors(arrays).repeat())).map(look_up)
    options = tf.data.Options()
    options.experimental_optimization.apply_default_optimizations = False  # they would copy the arrays
    options.experimental_external_state_policy = tf.data.experimental.ExternalStatePolicy.IGNORE
    batch_rows = BatchRows(batch_size if rows % batch_size == 0 else None, is_chunked=True)
    return marked(untuned(dataset.with_options(options)).prefetch(tf.data.AUTOTUNE), batch_rows)


def _in_order(rows: int, batch_size: int, rank: int, size: int, number: int, _: Shuffle) -> tf.data.Dataset:
    return marked(_cut(tf.range(rows, dtype=tf.int64), batch_size, rank, size))


def _shuffled_whole(
    rows: int, batch_size: int, rank: int, size: int, number: int, shuffle_rows: Shuffle
) -> tf.data.Dataset:
    several = communicator.size() > 1 or history.takes_newcomers()
    is_checked = several and order.check_is_on()  # also if the step takes the rows
    begin = order.pass_of(number, tf.TensorSpec([None], tf.int64)) if is_checked else None

    @do_not_convert
    def batches(_: tf.Tensor) -> tf.data.Dataset:
        positions = shuffle_rows(tf.range(rows, dtype=tf.int64))
        if begin is not None:
            with tf.control_dependencies([order.note_positions(begin(), positions)]):
                positions = tf.identity(positions)
        return _cut(positions, batch_size, rank, size)

    length = -(-rows // batch_size)
    return marked(tf.data.Dataset.range(1).flat_map(batches).apply(tf.data.experimental.assert_cardinality(length)))


def _shuffled_within_batches(
    rows: int, batch_size: int, rank: int, size: int, number: int, shuffle_rows: Shuffle
) -> tf.data.Dataset:
    shuffled = tf.data.Dataset.range(rows).batch(batch_size, drop_remainder=rows % batch_size == 0).map(shuffle_rows)
    # Positions are compared even if the step takes the rows.
    return share_dataset(shuffled, communicator.rank(), communicator.size(), number, takes=size > 1)


def _cut(positions: tf.Tensor, batch_size: int, rank: int, size: int) -> tf.data.Dataset:
    """Returns a dataset of a rank's positions in each batch.

    All batches of a pass are split at once, which needs few operations per batch.
    """
    rows = positions.shape[0]
    end_of_full = rows // batch_size * batch_size
    first, end = chunk(batch_size, rank, size)
    batches = tf.data.Dataset.from_tensor_slices(tf.reshape(positions[:end_of_full], [-1, batch_size])[:, first:end])
    if end_of_full == rows:
        return batches
    first, end = chunk(rows - end_of_full, rank, size)
    batches = batches.concatenate(tf.data.Dataset.from_tensors(positions[end_of_full + first : end_of_full + end]))
    # The number of rows must be unknown on all ranks, even on a rank whose last batch is full.
    return batches.map(_with_unknown_rows)


@do_not_convert
def _with_unknown_rows(positions: tf.Tensor) -> tf.Tensor:
    return tf.raw_ops.PlaceholderWithDefault(input=positions, shape=[None])


def check_same_arrays(arrays: Any, rank: int) -> None:
    """Checks that all ranks read the same arrays, by shapes and a sample of rows. COLLECTIVE.

    Raises: RankMismatchError: shapes differ, or values differ in every array whose rows are not all equal, so the rows
        are in another order. If some arrays are equal, this only warns, because the values of the others may be random.
    """
    samples = [_sample(array) for array in keras.tree.flatten(arrays) if hasattr(array, "shape") and array.shape]
    gathered = history.with_own(communicator.all_gather_object(samples, name="keras_ddl/arrays"), samples)
    shapes = [[shape for shape, _, _ in theirs] for theirs in gathered]
    require_equal_values(
        shapes,
        _RULE,
        _REMEDY,
        received=lambda *two: f"arrays of shapes {two[0]} on rank 0 and {two[1]} on rank {two[2]}",
    )
    other = other_rank(gathered)
    if other is None:
        return
    differing = [i for i, (one, theirs) in enumerate(zip(gathered[0], gathered[other])) if one != theirs]
    agreeing = [i for i, (_, _, rows_differ) in enumerate(gathered[0]) if rows_differ and i not in differing]
    received = f"Received: values on rank {other} that differ from rank 0's in array(s) {differing} of {len(samples)}"
    if not agreeing:
        raise RankMismatchError(f"{_RULE} {received} (rank {rank}). {_REMEDY}")
    if rank == 0:
        stack_position.warn(
            f"{_RULE} {received}. Training continues, and each rank takes its rows from its own arrays. That does no "
            f"harm if the differing arrays are random noise; for any other data it is wrong. {_REMEDY}"
        )


def warn_of_equal_batches(batch: Any, rank: int) -> None:
    """Warns, once per process, when all ranks pass equal rows to a method that expects different rows on each rank.

    COLLECTIVE at the first call.
    """
    global _batches_compared
    if _batches_compared:
        return
    _batches_compared = True
    leaves = [np.asarray(leaf) for leaf in tf.nest.flatten(batch, expand_composites=True) if hasattr(leaf, "shape")]
    content = [pickle.dumps(leaf) if leaf.dtype.hasobject else leaf.tobytes() for leaf in leaves]
    if is_equal(b"".join(content), "keras_ddl/batch"):
        size = communicator.size()
        stack_position.warn(
            "train_on_batch and test_on_batch take different rows on each rank, and use the rows of all ranks as one "
            f"batch. Received: the same rows on all {size} ranks (rank {rank}), so each row counts {size} times. Pass "
            "only this rank's rows (keras_ddl.data.chunk), or use fit, which divides the rows itself."
        )


def _sample(array: Any) -> tuple[tuple[int, ...], bytes, bool]:
    """Returns the shape, a digest of a sample of rows, and whether these rows differ from one another."""
    shape = tuple(array.shape)
    if hasattr(array, "iloc"):  # pandas
        sample = array.iloc[:: _step(shape[0], _ROWS)].to_numpy()
    elif isinstance(array, (np.ndarray, tf.Tensor)):
        sample = np.asarray(array[:: _step(shape[0], _ROWS)])
    else:
        return shape, b"", False
    sample = sample.reshape(len(sample), int(np.prod(sample.shape[1:])))
    step = _step(sample.shape[1], _VALUES)
    sample = np.ascontiguousarray(sample[:, step // 2 :: step])
    rows = [pickle.dumps(row) if sample.dtype.hasobject else row.tobytes() for row in sample]
    return shape, digest(b"".join(rows)), len(set(rows)) > 1


def _step(length: int, most: int) -> int:
    return max(1, -(-length // most))
