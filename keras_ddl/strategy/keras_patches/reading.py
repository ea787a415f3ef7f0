"""Patches of how Keras reads data: building from the data's spec, agreed shuffling, checks before the first step.

Patched: keras/src/backend/tensorflow/trainer.py, trainers/data_adapters/array_data_adapter.py (3.15.1).
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable
from typing import Any

from keras_ddl.compat import keras as keras_compat
from keras_ddl.compat.keras import keras
from keras_ddl.compat.tensorflow import tf
from keras_ddl.errors import KerasDdlError
from keras_ddl.strategy import data
from keras_ddl.strategy.data import arrays, py_dataset

_thread = threading.local()


def maybe_symbolic_build(original: Callable[..., Any]) -> Callable[..., Any]:
    """Builds the model from the data's element_spec, if it can be built by calling it.

    Keras takes a batch from the iterator for its shapes, and a generator cannot give it back: its rows would be lost.
    Without a strategy, Keras builds nothing here: the step does, when it is traced. So does it here when calling the
    model fails, because its steps may never do that (a GAN, a siamese network); if they do, they fail alike. Ragged and
    sparse inputs are left to the step, too, because Keras's symbols would stand for dense ones.
    """

    def _maybe_symbolic_build(self, iterator=None, data_batch=None):
        strategy = keras_compat.strategy_of(self)
        if strategy is None:
            return original(self, iterator=iterator, data_batch=data_batch)
        if iterator is not None:
            spec = iterator._distributed_dataset.element_spec
            leaves = [_symbolic(leaf) for leaf in tf.nest.flatten(spec)]
            if any(leaf is _UNKNOWN for leaf in leaves):
                return None
            data_batch = tf.nest.pack_sequence_as(spec, leaves)
        elif any(isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor)) for leaf in tf.nest.flatten(data_batch)):
            return None
        if type(self).call is keras.Model.call:
            return None  # there is none to be called
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about what this only tries
            try:
                return original(self, data_batch=data_batch)
            except KerasDdlError:
                raise
            except Exception:  # a model's own code, which may fail in any way; what matters fails again in the step
                return None

    return _maybe_symbolic_build


_UNKNOWN = object()


def _symbolic(spec: Any) -> Any:
    if isinstance(spec, tf.OptionalSpec):
        return None  # how Keras carries a None through tf.data
    if not isinstance(spec, tf.TensorSpec) or spec.shape.rank is None:
        return _UNKNOWN
    return keras.KerasTensor(tuple(spec.shape), keras.backend.standardize_dtype(spec.dtype))


def epoch_iterator_init(original: Callable[..., Any]) -> Callable[..., Any]:
    """Checks the batch size and prepares shuffling."""

    def __init__(self, distribute_strategy=None, *args, **kwargs):
        if not keras_compat.is_ours(distribute_strategy):
            original(self, distribute_strategy, *args, **kwargs)
            return
        rank, size = distribute_strategy.rank, distribute_strategy.size
        data.check_batch_rows(kwargs.get("batch_size"), size, rank, "batch_size")
        self._ddl_shuffle = None
        if py_dataset.has_rows(kwargs.get("x")):
            chosen = {key: kwargs[key] for key in ("shuffle", "class_weight") if key in kwargs}
            kwargs["x"] = py_dataset.RowsAdapter(kwargs["x"], rank, size, **chosen)
        _thread.iterator, _thread.strategy = self, distribute_strategy
        try:
            original(self, distribute_strategy, *args, **kwargs)
        finally:
            _thread.iterator = _thread.strategy = None
        if size == 1:
            return
        arrays.check_same_arrays(getattr(self.data_adapter, "_inputs", None), rank)
        first_batches = getattr(self.data_adapter, "_first_batches", None)  # of a generator, which Keras has looked at
        if first_batches:
            rows = next((len(leaf) for leaf in tf.nest.flatten(first_batches[0]) if getattr(leaf, "shape", ())), None)
            data.check_batch_rows(rows, size, rank, "the generator's first batch")

    return __init__


def array_dataset(original: Callable[..., Any]) -> Callable[..., Any]:
    """Reads this rank's rows of arrays only. Shuffles alike on all ranks and differently in each epoch, also when the
    script has set no seed.

    A global seed alone would do the first but not the second: under one, the permutation that Keras draws inside the
    dataset is the same in every epoch. When the script itself has set a seed, Keras's order is left as it is.
    """

    def get_tf_dataset(self):
        strategy = getattr(_thread, "strategy", None)
        if strategy is None:
            return original(self)
        shuffle_rows = tf.random.shuffle
        if self._shuffle and not strategy.random_state.seeded_by_script:
            seed = tf.Variable([0, 0], dtype=tf.int64, trainable=False, name="keras_ddl_shuffle_seed")
            _thread.iterator._ddl_shuffle = (strategy, seed)
            shuffle_rows = functools.partial(_shuffle_from, seed, [0])
        return arrays.dataset_of_rows(
            self._inputs,
            strategy.rank,
            strategy.size,
            data.agree_number(),
            batch_size=self._batch_size,
            shuffle=self._shuffle,
            shuffle_rows=shuffle_rows,
        )

    return get_tf_dataset


def _shuffle_from(seed: tf.Variable, counter: list[int], value: tf.Tensor) -> tf.Tensor:
    counter[0] += 1
    return tf.random.experimental.stateless_shuffle(value, seed=seed + counter[0])


def get_iterator(original: Callable[..., Any]) -> Callable[..., Any]:
    """Sets the seed of the epoch that begins."""

    def _get_iterator(self):
        if getattr(self, "_ddl_shuffle", None) is not None:
            strategy, seed = self._ddl_shuffle
            seed.assign(strategy.random_state.next_shuffle_seed())
        return original(self)

    return _get_iterator
