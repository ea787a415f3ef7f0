"""Datasets that only rank 0 reads; it sends each rank its rows: Strategy(reader="rank0").

This is for data that differs each time it is read, such as unseeded generators or maps in any order. Other ranks
receive only the rows that they train on.

All these datasets of a process share one communicator, in a module variable: making one is collective, and a process is
one rank of one job at a time. A later job of the process gets a new one.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from keras_ddl import communicator
from keras_ddl.communicator.first_rank import on_first_rank
from keras_ddl.compat import datasets
from keras_ddl.compat.tensorflow import as_array, do_not_convert, tf
from keras_ddl.data.rows import chunk, chunked_rows, static_rows, take_chunk, with_rows
from keras_ddl.data.share import agree_number, marked
from keras_ddl.data.streams import Parts, Stream, StreamError, wait_for_closed
from keras_ddl.data.untuned import untuned
from keras_ddl.errors import ConfigError, KerasDdlError
from keras_ddl.topology import Topology

# At most one pair: the topology of the job, and the communicator of its streams.
_channels: list[tuple[Topology, communicator.Communicator]] = []
_TENSORS = (tf.TensorSpec, tf.RaggedTensorSpec, tf.SparseTensorSpec)


def dataset_from_rank_0(make: Callable[[], tf.data.Dataset]) -> DatasetFromRank0:
    """Returns this rank's rows of the batches of a dataset that only rank 0 makes and reads. COLLECTIVE.

    Reading is collective, too: all ranks begin the same number of passes in the same order and read the same number of
    batches.

    Args:
        make: returns the dataset; called on rank 0.
    Raises: ConfigError, on every rank: a component is not a dense, ragged or sparse tensor. Errors of `make`;
        later errors of reading on rank 0, as TensorFlow reports exceptions of generators.
    Cost: each row is sent once, from rank 0 to its rank, ahead of the steps; memory for `streams.AHEAD` batches on rank
        0, and on every rank for its part of that many batches.
    """
    sources: list[tf.data.Dataset] = []

    def facts_of_source() -> tuple[Any, int, bool]:
        wait_for_closed()
        source = make()
        sources.append(source)
        _check(source.element_spec)
        return source.element_spec, int(source.cardinality()), datasets.components_may_differ(source)

    spec, cardinality, may_differ = on_first_rank(facts_of_source, "keras_ddl/data/source")
    dataset = DatasetFromRank0(
        sources[0] if sources else None, spec, cardinality, f"data=rank0/dataset_{agree_number()}", _channel()
    )
    marked(dataset, chunked_rows(spec, may_differ=may_differ))
    return dataset


class DatasetFromRank0(datasets.UnaryUnchangedStructureDataset):
    """This rank's rows of the batches of `source`, a dataset that only rank 0 has.

    An iterator that is made outside of a tf.function makes an iterator of `source` at once, because a shuffle takes its
    next seeds at that moment, as in one process.
    """

    def __init__(
        self, source: tf.data.Dataset | None, spec: Any, cardinality: int, name: str, comm: communicator.Communicator
    ) -> None:
        self._source, self._cardinality, self._name, self._comm = source, cardinality, name, comm
        self._passes = itertools.count(1)
        self._streams: weakref.WeakSet[Stream] = weakref.WeakSet()
        self._own_spec = tf.nest.map_structure(lambda leaf: _spec_of_rank(leaf, comm.rank, comm.size), spec)
        # TensorFlow keeps the functions of a dataset for the life of the process, so they must not refer to this object
        # or its source. Readers of this dataset keep the object alive.
        owner = weakref.ref(self)
        any_pass = self._dataset(lambda: _begin_pass(owner()))
        super().__init__(any_pass, datasets.variant_tensor(any_pass))

    def __iter__(self) -> Any:
        if not tf.executing_eagerly():
            return super().__iter__()
        # Popped, so that the functions of this pass's dataset do not keep the source alive.
        pass_arguments = [(next(self._passes), None if self._source is None else iter(self._source))]
        return iter(self._dataset(pass_arguments.pop))

    def close(self) -> None:
        """Ends this rank's unfinished passes."""
        for stream in list(self._streams):
            stream.close()

    def _dataset(self, begin: Callable[[], tuple[int, Any]]) -> tf.data.Dataset:
        """Returns a dataset of one pass. begin: returns the number of the pass, and on rank 0, its data."""
        components, own_spec = _components(self._own_spec), self._own_spec
        comm, name_of_dataset, streams = self._comm, self._name, self._streams  # without the source

        def batches() -> Iterator[tuple[Any, ...]]:
            number, batches_of_all = begin()
            name = f"{name_of_dataset}/pass_{number}"
            read = None
            if batches_of_all is not None:
                wait_for_closed()
                read = functools.partial(_parts_of_ranks, batches_of_all, comm.size)
            stream = Stream(comm, name, read)
            streams.add(stream)
            try:
                for parts in stream:
                    yield tuple(parts)
            except KerasDdlError as error:
                raise StreamError(name, error) from error
            except tf.errors.InvalidArgumentError as error:  # TensorFlow turns a ValueError into this class
                raise ValueError(error.message) from error

        @do_not_convert
        def pack(*tensors: tf.Tensor) -> Any:
            left = iter(tensors)
            return tf.nest.map_structure(lambda leaf: _packed(leaf, left), own_spec)

        dataset = tf.data.Dataset.from_generator(batches, output_signature=tuple(components)).map(pack)
        if self._cardinality >= 0:
            dataset = dataset.apply(tf.data.experimental.assert_cardinality(self._cardinality))
        return untuned(dataset).prefetch(1)


def _begin_pass(dataset: DatasetFromRank0 | None) -> tuple[int, Any]:
    if dataset is None:
        raise RuntimeError(
            'A dataset of Strategy(reader="rank0") must exist while it is read. Received: a read after the program '
            "deleted its last reference. Keep the dataset in a variable."
        )
    return next(dataset._passes), dataset._source


def _channel() -> communicator.Communicator:
    """Returns the communicator of the streams of this job. COLLECTIVE at the first call."""
    place = communicator.topology()
    if not _channels or _channels[0][0] is not place:
        made = communicator.split(0, name="keras_ddl/data")
        assert made is not None
        _channels[:] = [(place, made)]
    return _channels[0][1]


# ---- on rank 0


def _parts_of_ranks(batches: Iterable[Any], size: int) -> Iterator[list[Parts]]:
    """Yields the arrays of every rank, batch by batch."""
    for batch in batches:
        leaves = tf.nest.flatten(batch)
        yield [[array for leaf in leaves for array in _arrays(leaf, rank, size)] for rank in range(size)]


def _arrays(leaf: Any, rank: int, size: int) -> Iterator[Any]:
    """Yields the arrays of one rank's rows of a component."""
    if isinstance(leaf, tf.experimental.Optional):
        return
    if isinstance(leaf, tf.Tensor) and leaf.dtype != tf.string:
        array = as_array(leaf)
        yield array if array.ndim == 0 else array[slice(*chunk(len(array), rank, size))]
        return
    for part in tf.nest.flatten(take_chunk(leaf, rank, size), expand_composites=True):
        yield part.numpy()


def _check(spec: Any) -> None:
    for leaf in tf.nest.flatten(spec):
        is_absent = leaf == tf.OptionalSpec(None)  # how Keras passes None through tf.data
        if not is_absent and (not isinstance(leaf, _TENSORS) or leaf.dtype in (tf.variant, tf.resource)):
            raise ConfigError(
                'With Strategy(reader="rank0") a batch must consist of dense, ragged and sparse tensors, which rank '
                f"0 can send. Received: a component {leaf} (rank 0). Leave it out, or map it to tensors."
            )


# ---- on every rank


def _spec_of_rank(leaf: Any, rank: int, size: int) -> Any:
    rows = static_rows(leaf) if isinstance(leaf, _TENSORS) else None
    if rows is None:
        return leaf
    first, end = chunk(rows, rank, size)
    return with_rows(leaf, end - first)


def _components(spec: Any) -> list[tf.TensorSpec]:
    return [part for leaf in tf.nest.flatten(spec) if isinstance(leaf, _TENSORS) for part in _flat(leaf)]


def _flat(spec: Any) -> list[tf.TensorSpec]:
    return [tf.TensorSpec(part.shape, part.dtype) for part in tf.nest.flatten(spec, expand_composites=True)]


def _packed(leaf: Any, left: Iterator[tf.Tensor]) -> Any:
    if isinstance(leaf, tf.OptionalSpec):
        return tf.experimental.Optional.empty(None)
    if isinstance(leaf, tf.TensorSpec):
        return next(left)
    return tf.nest.pack_sequence_as(leaf, [next(left) for _ in _flat(leaf)], expand_composites=True)
