"""How Keras reads data: this rank's rows, agreed shuffling, checks before the first step, and fits that go on inside an
epoch (`data/position.py`).

Replaced: TFEpochIterator, and `_maybe_symbolic_build` of keras/src/backend/tensorflow/trainer.py (3.15.1).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from keras_ddl.compat import epoch_iterators
from keras_ddl.compat import keras as keras_compat
from keras_ddl.compat.context import setting
from keras_ddl.compat.tensorflow import tf
from keras_ddl.data import arrays, py_dataset
from keras_ddl.data.position import Reading
from keras_ddl.data.rows import BatchRows
from keras_ddl.data.share import agree_number, batch_rows_of
from keras_ddl.strategy import fits
from keras_ddl.strategy.step.keras_step import UNKNOWN

_KerasIterator: Any = keras_compat.tf_trainer.TFEpochIterator
_reader: ContextVar[Any] = ContextVar("keras_ddl_reader", default=None)
_iterators: weakref.WeakKeyDictionary[Any, BatchRows] = weakref.WeakKeyDictionary()


def rows_of(iterator: Any) -> BatchRows:
    """Returns what is known of the batches of a tf.data iterator that an EpochIterator has made."""
    return _iterators.get(iterator, UNKNOWN)


class Reader:
    """What a call of fit, evaluate or predict reads. Inside `as_current()`, the first EpochIterator made is its own."""

    def __init__(self, model: Any, trains: bool = False) -> None:
        self.model = model
        self.trains = trains
        self.batch_rows: BatchRows | None = None  # None until there is an iterator

    def as_current(self) -> Any:
        """Returns a context for the call."""
        return setting(_reader, self)


def current() -> Reader | None:
    """Returns the reader of the call that runs on this thread."""
    return _reader.get()


class EpochIterator(_KerasIterator):
    """Keras's, for the rows of a rank."""

    def __init__(self, distribute_strategy: Any = None, *args: Any, **kwargs: Any) -> None:
        self._reading: Reading | None = None
        self._shuffle_seed: tf.Variable | None = None
        self.batch_rows = UNKNOWN
        if keras_compat.is_ddl_strategy(distribute_strategy):
            self._init_rows(distribute_strategy, args, kwargs)
        else:
            super().__init__(distribute_strategy, *args, **kwargs)
        reader = current()
        if reader is not None and reader.batch_rows is None:
            reader.batch_rows = self.batch_rows
            if reader.trains:
                fit = fits.of(reader.model)
                self._reading = fit.reading = Reading(self, keras_compat.strategy_of(reader.model))

    @property
    def element_spec(self) -> Any:
        """The type specs of the batches, of this rank's rows."""
        return self._distributed_dataset.element_spec

    @property
    def shuffles_by_agreement(self) -> bool:
        """Whether arrays are shuffled by seeds that the ranks agree on, because the script has set none."""
        return self._shuffle_seed is not None

    def _init_rows(self, strategy: Any, args: Any, kwargs: dict[str, Any]) -> None:
        rank, size = strategy.rank, strategy.size
        if py_dataset.has_rows(kwargs.get("x")):
            chosen = {key: kwargs[key] for key in ("shuffle", "class_weight") if key in kwargs}
            kwargs["x"] = py_dataset.RowsAdapter(kwargs["x"], rank, size, **chosen)
        super(_KerasIterator, self).__init__(*args, **kwargs)
        self._distribute_strategy = strategy
        adapter = self.data_adapter
        if isinstance(adapter, keras_compat.ArrayDataAdapter):
            dataset = self._rows_of_arrays(adapter, strategy)
        else:
            dataset = strategy.experimental_distribute_dataset(adapter.get_tf_dataset())
        self._distributed_dataset = dataset
        self.batch_rows = batch_rows_of(dataset)
        if size == 1:
            return
        arrays.check_same_arrays(epoch_iterators.inputs_of(adapter), rank)

    def _rows_of_arrays(self, adapter: Any, strategy: Any) -> tf.data.Dataset:
        """Reads this rank's rows only. Shuffles alike on all ranks and differently in each epoch, also when the script
        has set no seed.

        A global seed alone would do the first but not the second: under one, the permutation that Keras draws inside
        the dataset is the same in every epoch. When the script itself has set a seed, Keras's order is left as it is.
        """
        shuffle_rows = tf.random.shuffle
        read = epoch_iterators.arrays_of(adapter)
        if read.shuffle and not strategy.random_state.seeded_by_script:
            self._shuffle_seed = tf.Variable([0, 0], dtype=tf.int64, trainable=False, name="keras_ddl_shuffle_seed")
            shuffle_rows = functools.partial(_shuffle_from, self._shuffle_seed, [0])
        return arrays.dataset_of_rows(
            read.inputs,
            strategy.rank,
            strategy.size,
            agree_number(),
            batch_size=read.batch_size,
            shuffle=read.shuffle,
            shuffle_rows=shuffle_rows,
        )

    def _get_iterator(self) -> Any:
        if self._shuffle_seed is not None:  # that of the epoch that begins
            self._shuffle_seed.assign(self._distribute_strategy.random_state.next_shuffle_seed())
        return super()._get_iterator()

    def _enumerate_iterator(self) -> Iterator[Any]:
        """An epoch begins at the reading's position."""
        epoch = super()._enumerate_iterator
        for first, last, iterator in epoch() if self._reading is None else self._reading.epoch(epoch):
            _iterators[iterator] = self.batch_rows
            yield first, last, iterator


def _shuffle_from(seed: tf.Variable, counter: list[int], value: tf.Tensor) -> tf.Tensor:
    counter[0] += 1
    return tf.random.experimental.stateless_shuffle(value, seed=seed + counter[0])


def maybe_symbolic_build(original: Callable[..., Any]) -> Callable[..., Any]:
    """Builds nothing: as without a strategy, the first step does when it is traced, since it sees the same program."""

    def _maybe_symbolic_build(self: Any, iterator: Any = None, data_batch: Any = None) -> Any:
        if keras_compat.strategy_of(self) is None:
            return original(self, iterator=iterator, data_batch=data_batch)
        return None

    return _maybe_symbolic_build
