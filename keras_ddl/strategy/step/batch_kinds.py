"""Sorts global batches into kinds, and traces a step once for each kind, as often as one process does.

Keras wraps its steps in `tf.function(reduce_retracing=True)`, which decides by the types of a batch whether an earlier
trace serves it. Given only one rank's rows, tf.function would decide differently: the program's Python would run more
or less often than in one process, and kernels that count their draws would restart. So this module decides
for global batches, identically on all ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from keras_ddl.compat.datasets import iterator_of_type
from keras_ddl.compat.tensorflow import tf
from keras_ddl.data.rows import global_batch, is_spec_of_tensor, with_rows


class BatchKind:
    """The batches that one trace serves.

    Attributes:
        structure: structure of the batch, with its non-tensor values.
        specs: its tensors' specs, with all ranks' rows.
        traces: traces of the step for this kind, one for each position among the steps of an execution.
        built: pairs (position, is_single of the execution) for which this rank has built a graph.
    """

    def __init__(self, structure: str, specs: tuple[tf.TypeSpec, ...]) -> None:
        self.structure, self.specs = structure, specs
        self.traces: dict[int, tf.types.experimental.ConcreteFunction] = {}
        self.built: set[tuple[int, bool]] = set()

    def serves(self, structure: str, specs: tuple[tf.TypeSpec, ...]) -> bool:
        """Whether batches of these types are of this kind."""
        return structure == self.structure and all(map(_is_among, specs, self.specs))


class BatchKinds:
    """The kinds of batches that one step has seen so far."""

    def __init__(self) -> None:
        self._kinds: list[BatchKind] = []

    def __bool__(self) -> bool:
        return bool(self._kinds)

    def clear(self) -> None:
        """Forgets all kinds and their traces."""
        self._kinds.clear()

    def only_trace(self) -> BatchKind | None:
        """Returns the only kind so far, if exactly one of its steps was traced; else None."""
        kind = self._kinds[0] if len(self._kinds) == 1 else None
        return kind if kind is not None and list(kind.traces) == [0] else None

    def rebuild(self) -> None:
        """Rebuilds the ranks' graphs from the existing traces."""
        for kind in self._kinds:
            kind.built.clear()

    def of(self, batch: Any) -> BatchKind:
        """Returns the kind of a batch. `batch`: its structure, with the type specs of the global batch for tensors.

        As in tf.function(reduce_retracing=True), this is the most specific kind that serves the batch. If there is
        none, it is a new kind, which leaves open the extents that differ from earlier kinds.
        """
        leaves = tf.nest.flatten(batch)
        specs = tuple(leaf for leaf in leaves if is_spec_of_tensor(leaf))
        structure = repr(tf.nest.map_structure(lambda leaf: "" if is_spec_of_tensor(leaf) else leaf, batch))
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


def trace_for_all(function: Any, batch: Any, kind: BatchKind) -> None:
    """Traces a tf.function of this rank's part of a batch for all batches of a kind, with any numbers of rows."""
    if isinstance(function, tf.types.experimental.PolymorphicFunction):
        parts = _parts(tf.nest.flatten(global_batch(batch, None)), kind, itertools.repeat(None))
        function.get_concrete_function(tf.nest.pack_sequence_as(batch, parts))


def iterator_for_all(iterator: tf.data.Iterator, kind: BatchKind, rows: Sequence[int | None]) -> tf.data.Iterator:
    """Returns an iterator over this rank's parts of batches, with types that fit all batches of the kind.

    rows: this rank's rows of each flattened component; None: unknown.
    """
    spec = iterator.element_spec
    leaves = tf.nest.flatten(spec)
    parts = _parts(leaves, kind, rows)
    return iterator if parts == leaves else iterator_of_type(iterator, tf.nest.pack_sequence_as(spec, parts))


def _parts(leaves: Sequence[Any], kind: BatchKind, rows: Iterable[int | None]) -> list[Any]:
    specs = iter(kind.specs)
    return [with_rows(next(specs), count) if is_spec_of_tensor(leaf) else leaf for leaf, count in zip(leaves, rows)]


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
