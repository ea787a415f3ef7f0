"""Ragged and sparse tensors among the arguments of a step: whole on every rank.

What they are made of (values, splits, indices) is no rows of the batch, even where an extent happens to be the batch's.
Where each rank has rows of its own, all ranks' rows are gathered in the step. The cut is told how many rows they have
together, so that what is made of them with a row for each can be cut again.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.dims import Dim
from keras_ddl.cut.extents import Extents, Numbers
from keras_ddl.cut.program import Value
from keras_ddl.cut.report import Report
from keras_ddl.data.rows import gather_rows
from keras_ddl.errors import ConfigError


class _Argument(NamedTuple):
    spec: Any  # its type as it was given; None: it is no tensor, or one by itself
    has_rows: bool  # is ragged or sparse, with the rows of the batch
    first: int  # of its tensors among those of all arguments
    last: int


class Composites:
    """The ragged and sparse tensors among the arguments of a step.

    Args:
        arguments: in any structure, arrays as tensors.
        own_rows: each rank has rows of its own.
    Attributes:
        structure: the arguments.
        rows: that this rank was given: extent 0 of the first argument that has one; None: none has.
        kind: what has to be equal of two calls beside the tensors' shapes and constants to use one trace.
    Raises: ConfigError: other tensors that consist of several, where each rank has rows of its own.
    """

    def __init__(self, arguments: Any, *, own_rows: bool) -> None:
        self.structure = arguments
        leaves = tf.nest.flatten(arguments)
        self.rows: int | None = next((rows for rows in map(_rows, leaves) if rows is not None), None)
        self._arguments: list[_Argument] = []
        first = 0
        for leaf in leaves:
            last = first + sum(map(tf.is_tensor, tf.nest.flatten(leaf, expand_composites=True)))
            has_rows = isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor)) and _rows(leaf) == self.rows
            spec = tf.type_spec_from_value(leaf) if is_composite(leaf) else None
            self._arguments.append(_Argument(spec, has_rows, first, last))
            first = last
            if own_rows and is_composite(leaf) and not isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor)):
                raise ConfigError(
                    "Where each rank has rows of its own, a step takes tensors, ragged and sparse ones: how rows of "
                    f"others are put together is not known. Received: {type(leaf).__name__}. Give the step its parts, "
                    'or the whole batch on every rank (batches="global").'
                )
        self._own_rows = own_rows
        known = tf.nest.map_structure(lambda each: each if isinstance(each, tf.TypeSpec) else None, self.specs(None))
        self.kind = repr((known, [each.has_rows for each in self._arguments]))

    def specs(self, rows: int | None) -> Any:
        """Returns the arguments with type specs of the whole in place of tensors that consist of several.

        rows: of the whole batch if they are known when the step is traced.
        """
        leaves = tf.nest.flatten(self.structure)
        found = [leaf if each.spec is None else _whole_spec(each, rows) for leaf, each in zip(leaves, self._arguments)]
        return tf.nest.pack_sequence_as(self.structure, found)

    def without_tensors(self) -> Composites:
        """Returns what a trace may keep: the types, of which `whole`, `local_rows` and `tell` are made."""
        found = copy.copy(self)
        found.structure = None
        return found

    def shapes(self) -> list[tf.TensorShape | None]:
        """Returns, for every tensor of the arguments, its shape of the whole where it is a part of another; else None.

        Extents that change with every batch are open.
        """
        found: list[tf.TensorShape | None] = []
        for each in self._arguments:
            if each.spec is not None:
                found += [part.shape for part in tf.nest.flatten(_whole_spec(each, None), expand_composites=True)]
            elif each.last > each.first:
                found.append(None)
        return found

    def local_rows(self, tensors: Sequence[tf.Tensor]) -> tf.Tensor | None:
        """Returns the rows (int64) that one of them tells in the graph that is being traced; None: there is none."""
        for each in self._arguments:
            if each.has_rows:
                value = _packed(each, tensors)
                return tf.cast(value.nrows() if isinstance(value, tf.RaggedTensor) else value.dense_shape[0], tf.int64)
        return None

    def whole(self, tensors: Sequence[tf.Tensor], rank: int, name: str, report: Report) -> list[tf.Tensor]:
        """Returns the arguments' tensors, those of ragged and sparse ones of the whole batch. COLLECTIVE."""
        found = list(tensors)
        for number, each in enumerate(self._arguments):
            if each.has_rows and self._own_rows:
                rows = gather_rows(_packed(each, tensors), rank, name=f"{name}/argument_{number}")
                parts = tf.nest.flatten(rows, expand_composites=True)
                found[each.first : each.last] = parts
                kind = "ragged" if isinstance(rows, tf.RaggedTensor) else "sparse"
                report.gathered_argument(kind, len(parts))
        return found

    def tell(self, extents: Extents, values: Sequence[Value]) -> list[Value]:
        """Tells the cut how many rows they have. `values`: of the arguments' tensors. Returns theirs."""
        found: list[Value] = []
        for each in self._arguments:
            if not each.has_rows:
                continue
            parts = values[each.first : each.last]
            found += parts
            tell_rows(extents, each.spec, parts)
        return found


def tell_rows(extents: Extents, spec: Any, parts: Sequence[Value]) -> None:
    """Tells the cut that a ragged or sparse tensor, which consists of `parts`, has the rows of the batch."""
    if isinstance(spec, tf.RaggedTensorSpec):
        extents.set_dims(parts[1], (extents.rows + 1,))
        return
    others = enumerate(spec.shape.as_list()[1:], 1)
    shape = parts[2]
    extents.named[shape.key] = shape
    dims = [Dim.unknown("entry", shape.key, axis) if n is None else Dim(n) for axis, n in others]
    extents.set_numbers(shape, Numbers([extents.rows, *dims]))


def is_composite(leaf: Any) -> bool:
    """Whether an argument is a tensor that consists of several."""
    parts = tf.nest.flatten(leaf, expand_composites=True)
    return len(parts) != 1 or parts[0] is not leaf


def _rows(leaf: Any) -> int | None:
    if isinstance(leaf, tf.RaggedTensor):
        return int(leaf.nrows())
    if isinstance(leaf, tf.SparseTensor):
        return int(leaf.dense_shape[0])
    if is_composite(leaf) or not tf.is_tensor(leaf) or not leaf.shape.rank:
        return None
    return int(leaf.shape[0])


def _whole_spec(argument: _Argument, rows: int | None) -> Any:
    """Returns the type of the whole of an argument that consists of several tensors."""
    spec = argument.spec
    if not argument.has_rows:
        return spec
    shape = [rows, *spec.shape[1:]]
    if isinstance(spec, tf.SparseTensorSpec):
        return tf.SparseTensorSpec(shape, spec.dtype)
    return tf.RaggedTensorSpec(shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype)


def _packed(argument: _Argument, tensors: Sequence[tf.Tensor]) -> Any:
    parts = list(tensors[argument.first : argument.last])
    return tf.nest.pack_sequence_as(_whole_spec(argument, None), parts, expand_composites=True)
