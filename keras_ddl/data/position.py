"""Saves the position of a fit in its data, so that another process can continue with the same order of batches.

Keras reads an epoch with an EpochIterator; the one that trains has a `Reading`. A checkpoint keeps its `position`, and
a resumed fit moves there with `go_to`, so the next epoch begins in its middle. Batches of that epoch that were already
read are read again and dropped, because nothing else is exact for every pipeline. Earlier epochs are read again only if
their number does not determine the order.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from keras_ddl.communicator.reporting import stack_position
from keras_ddl.compat import datasets, epoch_iterators, replacing
from keras_ddl.compat import keras as keras_compat
from keras_ddl.compat import tensorflow as tf_compat
from keras_ddl.compat.tensorflow import tf
from keras_ddl.data.order import KEYS
from keras_ddl.errors import CheckpointError


class Reading:
    """The reading of one fit: the state of the EpochIterator that gives the training steps their batches.

    shuffles: draws the seeds with which all ranks shuffle in the same order; None without a Strategy.
    """

    def __init__(self, iterator: Any, shuffles: random.Random | None) -> None:
        self.iterator = iterator
        self._shuffles = shuffles
        self._begin: dict[str, Any] | None = None  # random states at the beginning of the epoch that is being read
        self._ends: list[dict[str, Any]] = []  # before every on_epoch_end of a PyDataset, which may shuffle
        self._target: dict[str, Any] | None = None
        # Whether rank 0, if it alone reads, decided to read earlier epochs again; None: every rank reads.
        self._rereads: bool | None = getattr(iterator, "rereads", None)
        self._note_epoch_ends()

    def position(self, epochs: int, batches: int) -> dict[str, Any]:
        """Returns this process's position as JSON: after `epochs` epochs and `batches` batches of the next one."""
        return {
            "epochs": epochs,
            "batches": batches,
            "length": epoch_iterators.batches_of_epoch(self.iterator),
            "begin": self._begin if batches else None,
            "now": self.random_states(),
            "ends": self._ends,
            "order": self._order(),
        }

    def go_to(self, position: dict[str, Any]) -> None:
        """Makes the next epoch begin at `position`, which a process with the same script has reached."""
        self._target = position
        self._restore(position["now"])

    def epoch(self, original: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Yields the same as `EpochIterator._enumerate_iterator`; after `go_to`, from the position on."""
        target, self._target = self._target, None
        if target is None:
            self._begin = self.random_states()
            yield from original()
            return
        self._warn_of_another_order(target)
        self._read_epochs(target, original)
        if target["begin"] is not None:
            self._restore(target["begin"])
        self._begin = self.random_states()
        # Python code that makes batches runs ahead in a thread, so it must draw its numbers again from the start.
        makes_batches = (keras_compat.GeneratorDataAdapter, keras_compat.PyDatasetAdapter)
        dropped = 0
        skipping = bool(target["batches"]) and not isinstance(self.iterator.data_adapter, makes_batches)
        for first, last, data in original():
            if first < target["batches"]:
                _drop(data, first, last, target["batches"])
                dropped = last + 1
                continue
            if skipping:
                skipping = False
                self._restore(target["now"])
            yield first, last, data
        if dropped < target["batches"]:
            raise _shorter(target["batches"])

    def random_states(self) -> dict[str, Any]:
        """Returns the states of Python's and NumPy's generators and of the agreed shuffles, as JSON."""
        legacy: Any = np.random.get_state()
        name, keys, *rest = legacy
        return {
            "python": _as_json(random.getstate()),
            "numpy": [name, keys.tolist(), *rest],
            "shuffles": _as_json(self._shuffles.getstate()) if self._shuffles is not None else None,
        }

    def _restore(self, states: dict[str, Any]) -> None:
        random.setstate(_from_json(states["python"]))
        name, keys, *rest = states["numpy"]
        np.random.set_state((name, np.array(keys, np.uint32), *rest))
        if self._shuffles is not None and states["shuffles"] is not None:
            self._shuffles.setstate(_from_json(states["shuffles"]))

    # ---- earlier epochs ----------------------------------------------------------------------------------------------

    def _read_epochs(self, target: dict[str, Any], original: Callable[[], Iterator[Any]]) -> None:
        """Brings the pipeline to the beginning of the epoch; its seeds advance whenever it is iterated."""
        iterator = self.iterator
        if iterator.steps_per_epoch or self._must_be_read():
            for _ in range(target["epochs"]):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # about the end of data of unknown length
                    with iterator.catch_stop_iteration():
                        for first, last, data in original():
                            for _ in range(first, last + 1):
                                next(data)
            return
        dataset = _Dataset(iterator)
        for epoch in range(target["epochs"]):
            dataset.iterate()
            if epoch_iterators.batches_of_epoch(iterator) or epoch:
                dataset.iterate()  # Keras makes a second iterator when it knows that the data is read
        if target["epochs"] and epoch_iterators.batches_of_epoch(iterator) is None:
            epoch_iterators.set_batches_of_epoch(iterator, target["length"])
        if self._ends:
            self._repeat_epoch_ends(target)

    def _must_be_read(self) -> bool:
        return must_be_read(self.iterator) if self._rereads is None else self._rereads

    # ---- PyDataset.on_epoch_end --------------------------------------------------------------------------------------

    def _note_epoch_ends(self) -> None:
        adapter = self.iterator.data_adapter
        if not isinstance(adapter, keras_compat.PyDatasetAdapter) or self.iterator.steps_per_epoch:
            return
        if type(adapter.py_dataset).on_epoch_end is keras_compat.keras.utils.PyDataset.on_epoch_end:
            return

        def on_epoch_end(original: Callable[[], None]) -> None:
            self._ends.append(self.random_states())
            original()

        replacing.replace([(adapter, "on_epoch_end", on_epoch_end)])

    def _repeat_epoch_ends(self, target: dict[str, Any]) -> None:
        ends, dataset = target["ends"], self.iterator.data_adapter.py_dataset
        if any(ends[0][name] != self._ends[0][name] for name in ("python", "numpy")):
            stack_position.warn(
                "A PyDataset that draws random numbers in on_epoch_end needs the same seed in every run, so that a "
                "resumed run reads in the same order. Received: a checkpoint from a run with another random state. "
                "Call keras.utils.set_random_seed(n), or give the Strategy a seed, before you make the data."
            )
        now = self.random_states()
        for states in ends[1:]:
            self._restore(states)
            dataset.on_epoch_begin()
            dataset.on_epoch_end()
        self._restore(now)
        self._ends = list(ends)

    # ---- another order -----------------------------------------------------------------------------------------------

    def _order(self) -> Any:
        """Returns, as JSON, the seeds that determine the order of shuffles, apart from `random_states`."""
        iterator = self.iterator
        seeds = [list(datasets.shuffle_seeds(each)) for each in _Dataset(iterator).shuffles()]
        adapter = iterator.data_adapter
        by_keras = isinstance(adapter, keras_compat.ArrayDataAdapter) and epoch_iterators.arrays_of(adapter).shuffle
        if by_keras and not iterator.shuffles_by_agreement and tf_compat.global_seed() is None:
            seeds.append([0, 0])
        return seeds

    def _warn_of_another_order(self, target: dict[str, Any]) -> None:
        if self._rereads is not None and self.iterator.source is None:
            return
        mine = self._order()
        unseeded = [0, 0] in mine
        if target["batches"] and (mine != target["order"] or unseeded):
            stack_position.warn(
                "A run that resumes within an epoch must read the data in the same order as the previous run. "
                f"Received: a dataset that shuffles with seeds {mine}, but with seeds {target['order']} in the "
                "previous run. This epoch may repeat or skip rows. Call keras.utils.set_random_seed(n), or give the "
                "Strategy a seed, before you make the data."
            )


def must_be_read(iterator: Any) -> bool:
    """Whether earlier epochs of an EpochIterator must be read again to reproduce a later epoch."""
    if isinstance(iterator.data_adapter, (keras_compat.ArrayDataAdapter, keras_compat.PyDatasetAdapter)):
        return False  # indexed: their order follows from the random states
    return not datasets.order_follows_from_passes(_Dataset(iterator).pipeline())


class _Dataset:
    """The tf.data pipeline under an EpochIterator."""

    def __init__(self, iterator: Any) -> None:
        source = getattr(iterator, "source", None)
        self._dataset = epoch_iterators.dataset_of(iterator) if source is None else source

    def pipeline(self) -> list[Any]:
        return datasets.pipeline_of(self._dataset, leave_out=lambda each: hasattr(each, KEYS))

    def shuffles(self) -> list[Any]:
        return [each for each in self.pipeline() if isinstance(each, datasets.ShuffleDataset)]

    def iterate(self) -> None:
        """Makes an iterator and drops it, so that a shuffle takes its next seeds."""
        if self.shuffles():
            iter(self._dataset)


def _drop(data: Any, first: int, last: int, end: int) -> None:
    if last >= end:
        raise CheckpointError(
            "steps_per_execution must divide the number of batches before the checkpoint. Received: "
            f"steps_per_execution={last + 1 - first}, and a checkpoint after {end} batches of an epoch. Use the "
            "steps_per_execution of the previous run."
        )
    for _ in range(first, last + 1):
        try:
            next(data)
        except (StopIteration, tf.errors.OutOfRangeError):
            raise _shorter(end) from None


def _shorter(end: int) -> CheckpointError:
    return CheckpointError(
        "A run that resumes within an epoch must read the same data as the previous run. Received: data that ends "
        f"before batch {end} of the epoch, where the checkpoint was made. Give fit the same data."
    )


def _as_json(state: tuple[Any, ...]) -> list[Any]:
    version, internal, gauss = state
    return [version, list(internal), gauss]


def _from_json(state: list[Any]) -> tuple[Any, ...]:
    return (state[0], tuple(state[1]), state[2])
