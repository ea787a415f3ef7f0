"""The arguments of a step: which of them have rows of the batch, their types when it is traced, and their placements.

A dense tensor with the rows of the batch is sharded: each rank has its rows. Everything else is replicated. A ragged or
sparse tensor consists of several components (values, splits, indices), whose rows are not the batch's rows, even if
an extent happens to be equal. The components are replicated; if each rank passes its own rows, the step gathers the
rows of all ranks. The cut knows how many rows such a tensor has, so results with one row for each of its rows
can be sharded again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from keras_ddl.communicator import step_names
from keras_ddl.compat.tensorflow import do_not_convert, tf
from keras_ddl.cut.analysis.dims import Dim
from keras_ddl.cut.analysis.extents import Extents
from keras_ddl.cut.analysis.placements import REPLICATED, Placement, Sharded
from keras_ddl.cut.analysis.program import Value
from keras_ddl.cut.analysis.report import Report
from keras_ddl.data.rows import gather_rows, rows_of, with_rows
from keras_ddl.errors import ConfigError

_WITH_ROWS = (tf.Tensor, tf.RaggedTensor, tf.SparseTensor)
_REPORTED = {tf.RaggedTensor: "ragged", tf.SparseTensor: "sparse"}  # names of gathered tensors in reports


@dataclass(frozen=True)
class _Leaf:
    """A leaf of the arguments.

    Attributes:
        constant: the leaf's value, part of the trace, if the leaf is not a tensor.
        spec: the leaf's type, with this rank's rows, if the leaf is a tensor.
        has_rows: the leaf has the rows of batch `batch` (0, or a batch of another size).
        is_gathered: the step gathers the rows of all ranks.
        first, last: the range of its components (a dense tensor has one) among the components of all arguments.
    """

    constant: Any = None
    spec: Any = None
    has_rows: bool = False
    is_gathered: bool = False
    first: int = 0
    last: int = 0
    batch: int = 0

    @property
    def is_composite(self) -> bool:
        return self.spec is not None and not isinstance(self.spec, tf.TensorSpec)

    @property
    def is_sharded(self) -> bool:
        return self.has_rows and not self.is_composite

    def spec_of_all(self, rows: int | None) -> Any:
        """Returns this leaf's type with the rows of all ranks; the batch has `rows` rows."""
        if self.has_rows or self.is_gathered:
            return with_rows(self.spec, rows if self.has_rows and self.batch == 0 else None)
        return self.spec

    def packed(self, tensors: Sequence[tf.Tensor], spec: Any) -> Any:
        """Returns this leaf as a value of type `spec`, from the components of all arguments."""
        return tf.nest.pack_sequence_as(spec, list(tensors[self.first : self.last]), expand_composites=True)


class Arguments:
    """The arguments of a call of a step.

    Args:
        structure: tensors (dense, ragged, sparse) and other values, which are constants of the step.
        has_rows: given the place of a leaf and its tensor, returns whether it has the rows of the batch.
        batch_of: given the place of a leaf with rows, returns the number of their batch: 0, or that of a batch of
            another size.
        own_rows: each rank passes its own rows.
        gathers_others: gather tensors whose rows are not the batch's, except scalars.
    Attributes:
        tensors: the components of all tensors, in the order in which the traced step takes them.
        types: the structure and the types of ragged and sparse tensors, which must be equal on all ranks.
    Raises: ConfigError: another type of composite tensor, while each rank passes its own rows.
    """

    def __init__(
        self,
        structure: Any,
        *,
        has_rows: Callable[[int, Any], bool],
        own_rows: bool,
        gathers_others: bool = False,
        batch_of: Callable[[int], int] = lambda place: 0,
    ) -> None:
        self._structure = tf.nest.map_structure(lambda _: None, structure)
        self.tensors: list[tf.Tensor] = []
        self._leaves: list[_Leaf] = []
        for place, leaf in enumerate(tf.nest.flatten(structure)):
            if not is_tensor(leaf):
                self._leaves.append(_Leaf(leaf))
                continue
            if own_rows and not isinstance(leaf, _WITH_ROWS):
                raise ConfigError(
                    "A step to which each rank passes its own rows takes only dense, ragged and sparse tensors, "
                    f"because rows of other types cannot be concatenated. Received: {type(leaf).__name__}. Pass its "
                    'component tensors, or use strategy.function(..., batches="global").'
                )
            is_dense = isinstance(leaf, tf.Tensor)
            of_batch = isinstance(leaf, _WITH_ROWS) and has_rows(place, leaf)
            is_gathered = own_rows and (not is_dense if of_batch else gathers_others and leaf.shape.rank != 0)
            spec = tf.TensorSpec(leaf.shape, leaf.dtype) if is_dense else tf.type_spec_from_value(leaf)
            first = len(self.tensors)
            self.tensors += tf.nest.flatten(leaf, expand_composites=True)
            batch = batch_of(place) if of_batch else 0
            self._leaves.append(_Leaf(None, spec, of_batch, is_gathered, first, len(self.tensors), batch))
        composites = [(each.has_rows, each.spec_of_all(None) if each.is_composite else None) for each in self._leaves]
        self.types = repr((self._structure, composites))

    @property
    def _tensor_leaves(self) -> list[_Leaf]:
        return [each for each in self._leaves if each.spec is not None]

    @property
    def placements(self) -> list[Placement]:
        """The placement of each component."""
        return [
            Sharded(0, rows=(each.batch,)) if each.is_sharded else REPLICATED
            for each in self._tensor_leaves
            for _ in range(each.first, each.last)
        ]

    def key(self, constant_key: Callable[[Any], Hashable]) -> Hashable:
        """Returns a key that two calls must share, besides the components' shapes, to use one trace."""
        constants = [None if each.spec is not None else (constant_key(each.constant),) for each in self._leaves]
        return self.types, tuple(constants), tuple((each.dtype, each.shape.rank) for each in self.tensors)

    def without_tensors(self) -> Arguments:
        """Returns the arguments without tensors, which a trace may keep."""
        kept = copy.copy(self)
        kept.tensors = []
        return kept

    # ---- the global arguments, for tracing

    def specs(self, rows: int | None, of_batch: Sequence[Any] | None = None) -> list[Any]:
        """Returns the type of each tensor (one for a ragged or sparse one), for a batch of `rows` rows.

        of_batch: types of all tensors; those with the rows of the batch are used.
        """
        specs = [each.spec_of_all(rows) for each in self._tensor_leaves]
        if of_batch is None:
            return specs
        return [other if each.has_rows else own for each, own, other in zip(self._tensor_leaves, specs, of_batch)]

    def shapes(self, specs: Sequence[Any]) -> list[tuple[int | None, ...]]:
        """Returns the shapes of tensors' components, given their types; extents that change by batch are open."""
        shapes: list[Any] = []
        for each, spec in zip(self._tensor_leaves, specs):
            spec = with_rows(spec, None) if each.is_composite and each.has_rows else spec
            shapes += [part.shape for part in tf.nest.flatten(spec, expand_composites=True)]
        return [shape if shape.rank is None else tuple(shape) for shape in shapes]

    def components(self, shapes: Sequence[Any]) -> list[tf.TensorSpec]:
        return [tf.TensorSpec(shape, each.dtype) for shape, each in zip(shapes, self.tensors)]

    def bound(self, step: Callable[..., Any], specs: Sequence[Any]) -> Callable[..., Any]:
        """Returns `step` as a function of the components, which make up tensors of types `specs`."""
        leaves, structure, types = self._leaves, self._structure, list(specs)

        @do_not_convert
        def components_of(*tensors: tf.Tensor) -> Any:
            left = iter(types)
            values = [each.constant if each.spec is None else each.packed(tensors, next(left)) for each in leaves]
            args, kwargs = tf.nest.pack_sequence_as(structure, values)
            return step(*args, **kwargs)

        return components_of

    # ---- this rank's arguments, for its graph

    def sharded(self) -> Iterator[tuple[int, int]]:
        """Yields, for each sharded tensor, the number of its batch and its place among the components."""
        for each in self._leaves:
            if each.is_sharded:
                yield each.batch, each.first

    def replicated(self) -> list[tf.Tensor]:
        """Returns the components that every rank uses in full, as they were passed."""
        used = [each for each in self._tensor_leaves if not each.has_rows and not each.is_gathered]
        return [tensor for each in used for tensor in self.tensors[each.first : each.last]]

    def rows_in(self, tensors: Sequence[tf.Tensor]) -> int | tf.Tensor | None:
        """Returns the number of this rank's rows in components of a graph; None: no argument has rows."""
        dense_first = sorted(
            (each for each in self._tensor_leaves if each.has_rows), key=lambda each: each.is_composite
        )
        return next((rows_of(each.packed(tensors, each.spec_of_all(None))) for each in dense_first), None)

    def gathered(self, tensors: Sequence[tf.Tensor], rank: int, scope: str, report: Report) -> list[tf.Tensor]:
        """Returns the components; gathered ones have the rows of all ranks. COLLECTIVE."""
        components = list(tensors)
        for place, each in enumerate(self._leaves):
            if each.is_gathered:
                own = each.packed(tensors, each.spec_of_all(None))
                parts = tf.nest.flatten(
                    gather_rows(own, rank, name=step_names.argument(scope, place)), expand_composites=True
                )
                components[each.first : each.last] = parts
                report.gathered_argument(_REPORTED.get(type(own), "whole"), len(parts))
        return components

    def declare_rows(self, extents: Extents, values: Sequence[Value]) -> list[Value]:
        """Declares to the cut which ragged and sparse tensors have the rows of the batch.

        values: values of the components.
        Returns: the values that were declared.
        """
        declared: list[Value] = []
        for each in self._tensor_leaves:
            if each.has_rows and each.is_composite:
                _declare_rows(extents, each.spec, values[each.first : each.last])
                declared += values[each.first : each.last]
        return declared


def is_tensor(leaf: Any) -> bool:
    """Whether an argument is a tensor of some kind, but not a variable, which a step may assign."""
    return tf.is_tensor(leaf) and not isinstance(leaf, tf.Variable)


def _declare_rows(extents: Extents, spec: Any, parts: Sequence[Value]) -> None:
    if isinstance(spec, tf.RaggedTensorSpec):
        extents.set_dims(parts[1], (extents.rows + 1,))
        return
    others = enumerate(spec.shape.as_list()[1:], 1)
    indices, values, shape = parts
    extents.set_dims(values, extents.dims(indices)[:1])
    extents.named[shape.key] = shape
    dims = [Dim.unknown("size", shape.key, axis) if n is None else Dim(n) for axis, n in others]
    extents.set_numbers(shape, (extents.rows, *dims))
