"""Private interfaces of Keras's iterator over epochs and its data adapters."""

from __future__ import annotations

from typing import Any, NamedTuple

from keras_ddl.compat.keras import ArrayDataAdapter
from keras_ddl.compat.tensorflow import tf


class Arrays(NamedTuple):
    """An adapter's `inputs`, a structure of tensors with equal numbers of rows, and how the adapter reads them."""

    inputs: Any
    batch_size: int
    shuffle: bool | str


def arrays_of(adapter: ArrayDataAdapter) -> Arrays:
    return Arrays(adapter._inputs, adapter._batch_size, adapter._shuffle)


def inputs_of(adapter: Any) -> Any:
    """Returns the arrays that an adapter reads; None if it reads no arrays."""
    return getattr(adapter, "_inputs", None)


def batches_of_epoch(iterator: Any) -> int | None:
    """Returns how many batches an epoch has; None while that is not known."""
    batches: int | None = iterator._num_batches
    return batches


def set_batches_of_epoch(iterator: Any, batches: int | None) -> None:
    iterator._num_batches = batches


def dataset_of(iterator: Any) -> Any:
    """Returns the dataset under an iterator; if a Strategy has wrapped it, the tf.data dataset inside."""
    dataset = iterator._distributed_dataset
    while not isinstance(dataset, tf.data.Dataset) and hasattr(dataset, "_dataset"):
        dataset = dataset._dataset
    return dataset


def forget_validation(model: Any) -> None:
    """Makes a running fit of `model` read its validation data again, because Keras caches the validation iterator."""
    if getattr(model, "_eval_epoch_iterator", None) is not None:
        model._eval_epoch_iterator = None
