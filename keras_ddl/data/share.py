"""Each rank's share of the data.

Every rank reads the global batch and keeps a contiguous chunk of its rows. So all ranks take the same number of steps
by construction, every row is used exactly once, and ranks need not agree on anything in a step. The price is that
every rank reads everything. If the input must not be read once per rank, use `per_rank_dataset`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from keras_ddl import communicator
from keras_ddl.communicator.comparison import require_equal
from keras_ddl.communicator.newcomers import history
from keras_ddl.compat import datasets
from keras_ddl.compat.tensorflow import do_not_convert, tf
from keras_ddl.data import order
from keras_ddl.data.rows import UNKNOWN, BatchRows, chunked_rows, take_chunk
from keras_ddl.errors import ConfigError

_MARK = "_keras_ddl_rank_share"  # attribute of a dataset of a rank's rows: its `BatchRows`
LET_RANK_0_READ = 'Or use keras_ddl.Strategy(reader="rank0"), with which rank 0 reads and sends every rank its rows.'
_last_number = 0


def share_dataset(
    dataset: tf.data.Dataset, rank: int, size: int, number: int | None = None, *, takes: bool = True
) -> tf.data.Dataset:
    """Returns `dataset` with each batch cut to the rows of `rank`. COLLECTIVE when the dataset shuffles.

    A dataset that was made from the result of this function is returned unchanged.

    Args:
        number: the number of the dataset, from `agree_number`, under which steps compare the ranks' batches (order.py);
            None: batches are not compared.
        takes: False: rows are taken later; batches are still compared.
    Raises:
        ConfigError: a shuffle has no seed, or a step has deterministic=False, so ranks would take chunks of different
            batches.
        RankMismatchError: the ranks shuffle with different seeds.
    """
    if is_shared(dataset) or (size == 1 and not history.takes_newcomers()):
        return dataset
    check_shuffle_seeds(dataset, rank)
    check_determinism(dataset, rank)

    spec, may_differ = dataset.element_spec, datasets.components_may_differ(dataset)

    @do_not_convert
    def take(*batch: Any) -> Any:
        leaves = [take_chunk(value, rank, size) if takes else value for value in tf.nest.flatten(batch)]
        return tf.nest.pack_sequence_as(spec, leaves)

    @do_not_convert
    def note_and_take(key: tf.Tensor, batch: Any) -> Any:
        with tf.control_dependencies([order.note(key, tf.nest.flatten(batch))]):
            return tf.nest.map_structure(_identity, take(batch))

    take_rows: Callable[..., Any]
    if number is not None and order.check_is_on():
        dataset, take_rows = order.numbered(dataset, number), note_and_take
    else:
        take_rows = take

    options = tf.data.Options()
    options.deterministic = True  # otherwise parallel maps give the ranks different orders of rows
    # One thread takes the rows: handing them to another thread would cost more than the few microseconds of slicing.
    return marked(dataset.map(take_rows).with_options(options), chunked_rows(spec, may_differ=may_differ))


def marked(dataset: tf.data.Dataset, rows: BatchRows = UNKNOWN) -> tf.data.Dataset:
    """Marks a dataset as one of a rank's own rows; `rows`: the facts about its global batches."""
    setattr(dataset, _MARK, rows)
    return dataset


def agree_number() -> int:
    """Returns a number for a dataset, the same on all ranks and larger than any before. COLLECTIVE."""
    global _last_number
    _last_number = 1 + int(
        communicator.all_reduce_array(np.array([_last_number]), op="max", name="keras_ddl/data/number")[0]
    )
    return _last_number


def is_shared(dataset: Any) -> bool:
    """Whether `dataset` is, or was made from, the result of `share_dataset`."""
    return any(hasattr(ancestor, _MARK) for ancestor in datasets.pipeline_of(dataset))


def batch_rows_of(dataset: Any) -> BatchRows:
    """Returns the facts about the global batches behind a dataset of this rank's rows."""
    return getattr(dataset, _MARK, UNKNOWN)


def check_shuffle_seeds(dataset: tf.data.Dataset, rank: int) -> None:
    """Checks that every `.shuffle()` in the dataset gives all ranks the same order. COLLECTIVE if there is one."""
    seeds = [datasets.shuffle_seeds(d) for d in datasets.pipeline_of(dataset) if isinstance(d, datasets.ShuffleDataset)]
    if not seeds:
        return
    if (0, 0) in seeds:
        raise ConfigError(
            "A dataset that shuffles must shuffle the same way on all ranks, because each rank keeps its own rows of "
            f"every batch. Received: a .shuffle() without a seed, made before any seed was set (rank {rank}). Make the "
            "dataset after keras_ddl.Strategy(), call keras.utils.set_random_seed(n) first, or use .shuffle(seed=n). "
            f"{LET_RANK_0_READ}"
        )
    require_equal(
        seeds,
        "keras_ddl/shuffle_seeds",
        "A dataset must shuffle with the same seed on all ranks.",
        f"Make the same datasets in the same order on every rank, or use .shuffle(seed=n). {LET_RANK_0_READ}",
    )


def check_determinism(dataset: tf.data.Dataset, rank: int) -> None:
    """Checks that no step of the dataset has deterministic=False, which no option of the dataset can undo."""
    for one in datasets.pipeline_of(dataset):
        if datasets.is_nondeterministic(one):
            raise ConfigError(
                "A dataset must give all ranks the same batches, because each rank keeps its own rows of every batch. "
                f"Received: deterministic=False in {datasets.dataset_kind(one)} (rank {rank}). Leave it out: with "
                f"num_parallel_calls the work still runs in parallel. {LET_RANK_0_READ} If each rank has its own data, "
                "use strategy.distribute_datasets_from_function."
            )


def _identity(value: Any) -> Any:
    return tf.identity(value) if tf.is_tensor(value) else value
