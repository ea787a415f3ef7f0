"""Kinds of global batches: for each, one process traces a step once, and so do the ranks.

Keras gives its steps to `tf.function(reduce_retracing=True)`, which decides by the types of a batch whether a trace
serves it or another is made. The rows of a rank would decide otherwise than those of the global batch: the program's
Python would run more or less often than in one process, and kernels that count what they have drawn would begin anew.
So the same decision is made here for global batches, the same on all ranks.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from keras_ddl import communicator
from keras_ddl.compat.datasets import iterator_of_type
from keras_ddl.compat.tensorflow import tf
from keras_ddl.data.rows import BatchRows, row_count, with_rows


class BatchKind:
    """The batches that one trace serves.

    Attributes:
        structure: of the batch, and what in it is no tensor. specs: of its tensors, all rows of them.
        traces: what was traced for it, by the place of the step in an execution of several.
        functions: what runs the steps, by how this rank holds such a batch.
        built: (place of the step, whether it is called with a batch instead of an iterator) of the ranks' graphs made.
    """

    def __init__(self, structure: str, specs: tuple[tf.TypeSpec, ...]) -> None:
        self.structure, self.specs = structure, specs
        self.traces: dict[int, Any] = {}
        self.functions: dict[Any, Any] = {}
        self.built: set[tuple[int, bool]] = set()

    def serves(self, structure: str, specs: tuple[tf.TypeSpec, ...]) -> bool:
        """Whether batches of these types are also of this kind."""
        return structure == self.structure and all(map(_is_among, specs, self.specs))


class BatchKinds:
    """The kinds of the batches that one step has met."""

    def __init__(self) -> None:
        self._kinds: list[BatchKind] = []
        self._iterators: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    def __bool__(self) -> bool:
        """Whether any kind was met."""
        return bool(self._kinds)

    def clear(self) -> None:
        """Forgets all kinds, and what was traced for them."""
        self._kinds.clear()
        self._iterators.clear()

    def of_iterator(
        self, iterator: tf.data.Iterator, rows: BatchRows, in_fit: bool, strategy: Any
    ) -> tuple[BatchKind, BatchRows, tf.data.Iterator]:
        """Returns the kind of the batches of an iterator over this rank's parts, what is known of their rows then, and
        an iterator in its place that is typed alike for all batches of the kind.
        """
        if iterator not in self._iterators:
            spec = iterator.element_spec
            kind = self.of(global_batch(spec, rows.total) if rows.spec is None else rows.spec)
            rows = rows.of_kind(kind.specs, accumulates_parts=in_fit)
            part = _part_of(iterator, kind, rows.of_rank(len(tf.nest.flatten(spec)), strategy))
            self._iterators[iterator] = kind, rows, part
        kind, rows, part = self._iterators[iterator]
        return kind, rows, iterator if part is None else part

    def traced_for(self, iterator: tf.data.Iterator) -> Any:
        """Returns what was traced for the batches of an iterator; None: nothing was."""
        return self._iterators[iterator][0].traces.get(0) if iterator in self._iterators else None

    def of(self, batch: Any) -> BatchKind:
        """Returns the kind of a batch. `batch`: its structure, with the type specs of the global batch for tensors.

        As tf.function(reduce_retracing=True) does: the most specific one that serves it; else a new one, of which the
        extents are open in which it differs from those before.
        """
        leaves = tf.nest.flatten(batch)
        specs = tuple(leaf for leaf in leaves if _is_of_tensor(leaf))
        structure = repr(tf.nest.map_structure(lambda leaf: "" if _is_of_tensor(leaf) else leaf, batch))
        served_by = None
        for kind in self._kinds:
            if kind.serves(structure, specs) and (served_by is None or served_by.serves(structure, kind.specs)):
                served_by = kind
        if served_by is None:
            for kind in self._kinds:
                common = _common(specs, kind.specs) if kind.structure == structure else None
                specs = specs if common is None else common
            served_by = BatchKind(structure, specs)
            self._kinds.append(served_by)
        return served_by


def global_batch(batch: Any, total: int | None) -> Any:
    """Returns type specs of the global batch, `total` rows of every tensor, in the structure of a rank's part of it.

    batch: tensors, arrays, or type specs of them.
    """
    return tf.nest.map_structure(lambda leaf: _whole(leaf, total), batch)


def total_rows(batch: Any) -> int | None:
    """Returns the rows of all ranks' parts of a batch; None if a rank has no tensor with rows. COLLECTIVE."""
    rows = row_count(batch)
    gathered = communicator.all_gather_object(None if rows is None else int(rows), name="keras_ddl/on_batch/rows")
    return None if None in gathered else sum(gathered)


def of_single_batches(model: Any, step_function: Any, batch: Any, kind: BatchKind) -> Any:
    """Returns what runs a step with a batch of train_on_batch or test_on_batch, as Keras's own function does."""

    def one_step_on_data(data: Any) -> Any:
        return model.distribute_strategy.run(step_function, args=(data,))

    if model.run_eagerly:
        return one_step_on_data
    function = tf.function(one_step_on_data, reduce_retracing=True, autograph=False)
    trace_for_all(function, batch, kind)
    return function


def trace_for_all(function: Any, batch: Any, kind: BatchKind) -> None:
    """Traces a tf.function of this rank's part of a batch for all parts of batches of a kind, whatever their rows."""
    if isinstance(function, tf.types.experimental.PolymorphicFunction):
        parts = _parts(tf.nest.flatten(global_batch(batch, None)), kind, itertools.repeat(None))
        function.get_concrete_function(tf.nest.pack_sequence_as(batch, parts))


def _part_of(iterator: tf.data.Iterator, kind: BatchKind, rows: Sequence[int | None]) -> tf.data.Iterator | None:
    """Returns an iterator over this rank's parts of batches, typed alike for all batches of a kind; None: it is so.

    rows: of this rank, for each of the flattened components; None where they are not known.
    """
    leaves = tf.nest.flatten(iterator.element_spec)
    parts = _parts(leaves, kind, rows)
    if parts == leaves:
        return None
    return iterator_of_type(iterator, tf.nest.pack_sequence_as(iterator.element_spec, parts))


def _parts(leaves: Sequence[Any], kind: BatchKind, rows: Iterable[int | None]) -> list[Any]:
    specs = iter(kind.specs)
    return [with_rows(next(specs), count) if _is_of_tensor(leaf) else leaf for leaf, count in zip(leaves, rows)]


def _is_of_tensor(leaf: Any) -> bool:
    # Keras carries a None through tf.data as an optional.
    return isinstance(leaf, tf.TypeSpec) and not isinstance(leaf, tf.OptionalSpec)


def _whole(leaf: Any, total: int | None) -> Any:
    if not isinstance(leaf, tf.TypeSpec):
        if isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor)):
            leaf = tf.type_spec_from_value(leaf)
        elif hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
            leaf = tf.TensorSpec(leaf.shape, leaf.dtype)
        elif hasattr(leaf, "__array__"):
            array = leaf.__array__()
            leaf = tf.TensorSpec(array.shape, array.dtype)
        else:
            return None if isinstance(leaf, tf.experimental.Optional) else leaf
    return with_rows(leaf, total)


def _is_among(spec: tf.TypeSpec, general: tf.TypeSpec) -> bool:
    return spec == general or (type(spec) is type(general) and spec.is_subtype_of(general))


def _common(specs: tuple[tf.TypeSpec, ...], others: tuple[tf.TypeSpec, ...]) -> tuple[tf.TypeSpec, ...] | None:
    common_specs = []
    for one, other in zip(specs, others):
        common = one if one == other else one.most_specific_common_supertype([other])
        if common is None:
            return None
        common_specs.append(common)
    return tuple(common_specs)
