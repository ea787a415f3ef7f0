"""Makes Keras read this rank's rows, shuffle equally on all ranks, and resume inside an epoch (`data/position.py`).

Replaced: TFEpochIterator, and `_maybe_symbolic_build` of keras/src/backend/tensorflow/trainer.py (3.15.1).
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from keras_ddl.communicator.first_rank import on_first_rank
from keras_ddl.communicator.reporting import stack_position
from keras_ddl.compat import epoch_iterators
from keras_ddl.compat import keras as keras_compat
from keras_ddl.compat.tensorflow import tf
from keras_ddl.data import arrays, py_dataset
from keras_ddl.data.from_rank_0 import DatasetFromRank0, dataset_from_rank_0
from keras_ddl.data.position import Reading, must_be_read
from keras_ddl.data.rows import UNKNOWN, BatchRows, chunked_rows
from keras_ddl.data.share import agree_number, batch_rows_of, is_shared, share_dataset
from keras_ddl.errors import ConfigError
from keras_ddl.strategy.base import BaseStrategy, strategy_of
from keras_ddl.strategy.calls import fits, trainer_calls

_KerasIterator: Any = keras_compat.tf_trainer.TFEpochIterator
_readers: weakref.WeakKeyDictionary[Any, weakref.ref[EpochIterator]] = weakref.WeakKeyDictionary()  # by tf.Iterator


_from_rank_0: weakref.WeakSet[DatasetFromRank0] = weakref.WeakSet()  # made by EpochIterators


def close_streams() -> None:
    """Stops reading ahead for fit, evaluate or predict when the outermost of these calls has ended."""
    if not trainer_calls.running():
        for dataset in list(_from_rank_0):
            dataset.close()
        _from_rank_0.clear()


def rows_of(iterator: tf.data.Iterator) -> BatchRows:
    """Returns the known facts about the batches of an iterator; none unless an EpochIterator made it."""
    reader = _readers[iterator]() if iterator in _readers else None
    return UNKNOWN if reader is None else reader.batch_rows


def learn_rows(iterator: tf.data.Iterator, counts: Sequence[Sequence[int | None]]) -> BatchRows:
    """Returns the facts about an iterator's batches, completed by the first batch's rows (BatchRows.learn)."""
    rows = rows_of(iterator).learn(counts)
    reader = _readers[iterator]() if iterator in _readers else None
    if reader is not None:
        reader.batch_rows = rows
    return rows


class EpochIterator(_KerasIterator):
    """Keras's EpochIterator, for this rank's rows."""

    def __init__(self, distribute_strategy: Any = None, *args: Any, **kwargs: Any) -> None:
        self._reading: Reading | None = None
        self._shuffle_seed: tf.Variable | None = None
        self.batch_rows = UNKNOWN
        self.source: tf.data.Dataset | None = None  # set only on rank 0, if only rank 0 reads
        self.reads_on_rank_0 = False  # Strategy(reader="rank0")
        self.rereads: bool | None = None  # in that case, rank 0's answer (data/position.py)
        self._batches_on_rank_0: int | None = None
        if keras_compat.is_ddl_strategy(distribute_strategy) and distribute_strategy.job.reads_on_rank_0:
            self._init_from_rank_0(distribute_strategy, args, kwargs)
        elif keras_compat.is_ddl_strategy(distribute_strategy):
            self._init_rows(distribute_strategy, args, kwargs)
        else:
            super().__init__(distribute_strategy, *args, **kwargs)
        loop = trainer_calls.innermost()
        if isinstance(loop, trainer_calls.Loop) and loop.iterator is None:  # not fit's second iterator, for validation
            loop.iterator = self
            if isinstance(loop, fits.Fit):
                strategy = strategy_of(loop.model)
                shuffles = None if strategy is None else strategy.random_state.shuffles
                self._reading = loop.reading = Reading(self, shuffles)

    @property
    def element_spec(self) -> Any:
        """The type specs of batches of this rank's rows."""
        return self._distributed_dataset.element_spec

    @property
    def shuffles_by_agreement(self) -> bool:
        """Whether arrays are shuffled with seeds that the ranks agree on, because the script has set no seed."""
        return self._shuffle_seed is not None

    def _init_from_rank_0(self, strategy: BaseStrategy, args: Any, kwargs: dict[str, Any]) -> None:
        """Reads on rank 0 only; other ranks do not look at their data at all."""
        number, self.reads_on_rank_0 = agree_number(), True

        def make() -> tf.data.Dataset:
            super(_KerasIterator, self).__init__(*args, **kwargs)
            adapter = self.data_adapter
            is_array = isinstance(adapter, keras_compat.ArrayDataAdapter)
            if not is_array and is_shared(adapter.get_tf_dataset()):
                raise ConfigError(
                    'With Strategy(reader="rank0") only rank 0 reads, so its dataset must have all rows. Received: a '
                    f"dataset from which each rank reads its own rows (rank {strategy.rank}). Pass a dataset of all "
                    "rows, not one from keras_ddl.data.from_files or strategy.distribute_datasets_from_function, or "
                    'make keras_ddl.Strategy() without reader="rank0".'
                )
            dataset = self._rows_of_arrays(adapter, strategy, 0, 1, number) if is_array else adapter.get_tf_dataset()
            self.source = dataset  # not compared with other ranks' data, because only this rank reads
            return dataset

        if strategy.rank != 0:
            steps = {name: kwargs[name] for name in ("steps_per_epoch", "steps_per_execution") if name in kwargs}
            super(_KerasIterator, self).__init__(tf.data.Dataset.range(0), **steps)
        self._distribute_strategy = strategy
        dataset = self._distributed_dataset = dataset_from_rank_0(make)
        _from_rank_0.add(dataset)
        self._batches_on_rank_0, shuffles, self.rereads = on_first_rank(
            lambda: (epoch_iterators.batches_of_epoch(self), self._shuffle_seed is not None, must_be_read(self)),
            "keras_ddl/data/reader",
        )
        if shuffles and self._shuffle_seed is None:  # draw as many seeds as rank 0, so that later seeds are equal
            self._shuffle_seed = _seed_variable()
        epoch_iterators.set_batches_of_epoch(self, self._batches_on_rank_0)
        self.batch_rows = batch_rows_of(dataset)

    def reset(self) -> None:
        """Resets as Keras does, but keeps rank 0's number of batches."""
        super().reset()
        if self.reads_on_rank_0:
            epoch_iterators.set_batches_of_epoch(self, self._batches_on_rank_0)

    def _init_rows(self, strategy: BaseStrategy, args: Any, kwargs: dict[str, Any]) -> None:
        """Makes the iterator for data that every rank reads, each taking its own rows."""
        rank, size = strategy.rank, strategy.size
        if strategy.job.goes_on:  # the step takes the rows, because a lost rank changes them
            rank, size = 0, 1
        elif py_dataset.has_rows(kwargs.get("x")):
            chosen = {key: kwargs[key] for key in ("shuffle", "class_weight") if key in kwargs}
            kwargs["x"] = py_dataset.RowsAdapter(kwargs["x"], rank, size, **chosen)
        super(_KerasIterator, self).__init__(*args, **kwargs)
        self._distribute_strategy = strategy
        adapter = self.data_adapter
        if isinstance(adapter, keras_compat.ArrayDataAdapter):
            dataset = self._rows_of_arrays(adapter, strategy, rank, size, agree_number())
            all_can_read = True
        else:
            dataset = adapter.get_tf_dataset()
            all_can_read = not is_shared(dataset)
            if strategy.job.goes_on and all_can_read:
                dataset = share_dataset(dataset, strategy.rank, strategy.size, agree_number(), takes=False)
            else:
                dataset = strategy.experimental_distribute_dataset(dataset)
        self._distributed_dataset = dataset
        self.batch_rows = batch_rows_of(dataset)
        if strategy.job.goes_on and all_can_read:
            self.batch_rows = dataclasses.replace(
                chunked_rows(dataset.element_spec, may_differ=self.batch_rows.may_differ), is_global=True
            )
        self.batch_rows = dataclasses.replace(self.batch_rows, all_can_read=all_can_read)
        if strategy.job.goes_on and not all_can_read and strategy.rank == 0:
            stack_position.warn(
                "fit can continue without a lost rank only if every rank can read all data. Received: a dataset "
                "from which each rank reads its own part, so the job will end if a rank is lost. Give fit the same "
                "dataset on all ranks."
            )
        if not strategy.is_several:
            return
        arrays.check_same_arrays(epoch_iterators.inputs_of(adapter), strategy.rank)

    def _rows_of_arrays(
        self, adapter: Any, strategy: BaseStrategy, rank: int, size: int, number: int
    ) -> tf.data.Dataset:
        """Reads this rank's rows only.

        Shuffles equally on all ranks and differently in each epoch, even if the script has set no seed.

        With only a global seed, Keras would draw the same permutation in every epoch. If the script itself has set a
        seed, Keras's order is kept.
        """
        shuffle_rows = tf.random.shuffle
        read = epoch_iterators.arrays_of(adapter)
        if read.shuffle and not strategy.random_state.seeded_by_script:
            self._shuffle_seed = _seed_variable()
            shuffle_rows = functools.partial(_shuffle_from, self._shuffle_seed, [0])
        return arrays.dataset_of_rows(
            read.inputs,
            rank,
            size,
            number,
            batch_size=read.batch_size,
            shuffle=read.shuffle,
            shuffle_rows=shuffle_rows,
        )

    def _get_iterator(self) -> Any:
        if self._shuffle_seed is not None:  # the seed of the new epoch
            self._shuffle_seed.assign(self._distribute_strategy.random_state.next_shuffle_seed())
        return super()._get_iterator()

    def _enumerate_iterator(self) -> Iterator[Any]:
        """Begins an epoch at the reading's position."""
        epoch = super()._enumerate_iterator
        for first, last, iterator in epoch() if self._reading is None else self._reading.epoch(epoch):
            _readers[iterator] = weakref.ref(self)
            yield first, last, iterator


def _seed_variable() -> tf.Variable:
    return tf.Variable([0, 0], dtype=tf.int64, trainable=False, name="keras_ddl_shuffle_seed")


def _shuffle_from(seed: tf.Variable, counter: list[int], value: tf.Tensor) -> tf.Tensor:
    counter[0] += 1
    return tf.random.experimental.stateless_shuffle(value, seed=seed + counter[0])


def maybe_symbolic_build(original: Callable[..., Any], model: Any, iterator: Any = None, data_batch: Any = None) -> Any:
    """Builds nothing, because the first step builds the model when it is traced, as in one process."""
    if strategy_of(model) is None:
        return original(model, iterator=iterator, data_batch=data_batch)
    return None
