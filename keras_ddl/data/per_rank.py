"""Batches that every rank makes from its own data; all ranks have the same number of batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keras_ddl import communicator, ops
from keras_ddl.compat.datasets import UnaryUnchangedStructureDataset, variant_tensor
from keras_ddl.compat.tensorflow import do_not_convert, tf
from keras_ddl.data.share import agree_number, marked
from keras_ddl.errors import ConfigError


def per_rank_dataset(dataset_fn: Callable[[Any], tf.data.Dataset], rank: int, size: int) -> PerRankDataset:
    """Returns this rank's dataset, from `dataset_fn(tf.distribute.InputContext)`, equally long on all ranks.

    COLLECTIVE over all ranks. Reading is COLLECTIVE, too, if a rank does not know its length (`PerRankDataset`).
    """
    return PerRankDataset(dataset_fn(tf.distribute.InputContext(size, rank, size)))


class PerRankDataset(UnaryUnchangedStructureDataset):
    """A dataset of per-rank batches that ends on all ranks at once.

    A rank whose data ends earlier continues with batches of zero rows, which weigh nothing, until all ranks are done.
    If all ranks know how many batches they have, they agree on the largest number when the dataset is made, and reading
    needs no communication. Otherwise the ranks exchange with every batch whether they have one (4 bytes), inside
    the dataset, so all ranks must read equally often. They do this in the thread that asks for the batch, never ahead
    of it, so a rank that stops reading leaves no other rank waiting. `map` and `prefetch` therefore apply to the rank's
    own batches, before the exchange.
    """

    def __init__(self, own: tf.data.Dataset, agreed: tuple[int, int] | None = None) -> None:
        self._own = own
        self._agreed = agreed or _agree(own)
        until_all_end = _until_all_end(own, *self._agreed)
        super().__init__(until_all_end, variant_tensor(until_all_end))
        marked(self)

    def map(self, *args: Any, **kwargs: Any) -> PerRankDataset:
        """Like tf.data.Dataset.map, on the rank's own batches."""
        return PerRankDataset(self._own.map(*args, **kwargs), self._agreed)

    def prefetch(self, *args: Any, **kwargs: Any) -> PerRankDataset:
        """Like tf.data.Dataset.prefetch, on the rank's own batches."""
        return PerRankDataset(self._own.prefetch(*args, **kwargs), self._agreed)


def _agree(own: tf.data.Dataset) -> tuple[int, int]:
    """Returns a number for the dataset, and the largest number of batches of a rank."""
    gathered = communicator.all_gather_object(int(own.cardinality()), name="keras_ddl/data/numbers_of_batches")
    unknown, endless = int(tf.data.UNKNOWN_CARDINALITY), int(tf.data.INFINITE_CARDINALITY)
    most = endless if endless in gathered else max(gathered)
    return agree_number(), unknown if unknown in gathered else most


def _until_all_end(own: tf.data.Dataset, number: int, batches: int) -> tf.data.Dataset:
    empty = tf.data.Dataset.from_tensors(_zero_rows(own.element_spec)).repeat()
    if batches != tf.data.UNKNOWN_CARDINALITY:
        return own.concatenate(empty).take(batches)

    @do_not_convert
    def ask(has_rows: tf.Tensor, batch: Any) -> tuple[tf.Tensor, Any]:
        return ops.all_reduce(has_rows, op="max", name=f"keras_ddl/data/{number}/more") > 0, batch

    own = tf.data.Dataset.zip((tf.data.Dataset.from_tensors(1).repeat(), own))
    empty = tf.data.Dataset.zip((tf.data.Dataset.from_tensors(0).repeat(), empty))
    dataset = own.concatenate(empty).map(ask).take_while(do_not_convert(lambda more, _: more))
    # Not a map: TensorFlow would make it parallel, and it would ask ahead of need.
    dataset = dataset.flat_map(do_not_convert(lambda _, batch: tf.data.Dataset.from_tensors(batch)))
    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False  # would ask ahead of need
    return dataset.with_options(options)


def _zero_rows(spec: Any) -> Any:
    def shape_of(leaf: Any) -> list[int]:
        return [0 if i == 0 else d or 0 for i, d in enumerate(leaf.shape)]

    def one(leaf: Any) -> Any:
        if getattr(leaf, "shape", None) is not None and leaf.shape.rank:
            if isinstance(leaf, tf.TensorSpec):
                return tf.zeros(shape_of(leaf), leaf.dtype)
            if isinstance(leaf, tf.SparseTensorSpec):
                shape = shape_of(leaf)
                return tf.SparseTensor(tf.zeros([0, len(shape)], tf.int64), tf.zeros([0], leaf.dtype), shape)
            if isinstance(leaf, tf.RaggedTensorSpec):
                values = tf.zeros([0, *shape_of(leaf)[leaf.ragged_rank + 1 :]], leaf.dtype)
                splits = [tf.zeros([1], leaf.row_splits_dtype)] * leaf.ragged_rank
                return tf.RaggedTensor.from_nested_row_splits(values, splits)
        raise ConfigError(
            "If each rank makes batches from its own data, all components must be tensors with rows, because a rank "
            f"whose data ends early continues with batches of no rows. Received: {leaf}. Give every rank the same "
            "number of batches (.repeat() and steps_per_epoch), or leave out this component."
        )

    return tf.nest.map_structure(one, spec)
