"""Integers of the rank's graph: extents and shapes of global tensors and of this rank's parts."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypeAlias

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.analysis.dims import Dim, Unknown, dim
from keras_ddl.cut.analysis.placements import Batch, Placement, Sharded

# An int where it is known when the step is traced, else an int64 scalar of the graph.
Scalar: TypeAlias = int | tf.Tensor
Vector: TypeAlias = list[int] | tf.Tensor


@dataclass(kw_only=True, eq=False)
class LocalShapes:
    """Computes extents in the graph that is being built, without repetition.

    Args: batch: the rows of all ranks and of this one. others: further batches of other sizes.
    Attributes: rows: the extent of the global batch.
    """

    batch: Batch
    others: tuple[Batch, ...] = ()

    def __post_init__(self) -> None:
        self.batches = (self.batch, *self.others)
        self.rows_of_batches = [_rows(number, each.total) for number, each in enumerate(self.batches)]
        self.rows = self.rows_of_batches[0]
        self._integers: dict[Hashable, tf.Tensor] = {}

    def rows_of(self, placement: Sharded) -> Dim:
        """Returns the extent of one block, in units."""
        return functools.reduce(operator.add, (self.rows_of_batches[each] for each in placement.rows))

    def local_rows(self, placement: Sharded) -> Scalar:
        """Returns the extent of one block on this rank, in units."""
        return self.total([self.batches[each].local for each in placement.rows])

    def extent(self, placement: Sharded) -> Dim:
        return placement.blocks * self.rows_of(placement) * placement.unit

    def local_extent(self, placement: Sharded) -> Scalar:
        return self.times(self.number(placement.blocks * placement.unit), self.local_rows(placement))

    def local_shape(self, dims: Sequence[Dim], placement: Placement, dtype: tf.DType | None = None) -> Vector:
        """Returns the shape of a rank's part of a tensor with these extents, in the form that `vector` returns."""
        shape: list[Dim | Scalar] = [*dims]
        if isinstance(placement, Sharded):
            shape[placement.axis] = self.local_extent(placement)
        return self.vector(shape, dtype)

    def static_local_shape(self, shape: tf.TensorShape, placement: Placement) -> tf.TensorShape:
        """Returns the static shape of a rank's tensor, given the global shape."""
        if not isinstance(placement, Sharded) or shape.rank is None:
            return shape
        extents, local = shape.as_list(), self.local_extent(placement)
        extents[placement.axis] = local if isinstance(local, int) else None
        return tf.TensorShape(extents)

    def number(self, value: Dim | int) -> Scalar:
        """Returns an extent. Raises: Pending: it depends on a future collective."""
        extent = dim(value)
        if extent.number is not None:
            return extent.number
        return self._once(extent, lambda: self._product(extent))

    def _product(self, extent: Dim) -> Scalar:
        factors = [self._unknown(each) for each in extent.unknowns]
        return functools.reduce(operator.mul, factors if extent.factor == 1 else [*factors, extent.factor])

    def _unknown(self, unknown: Unknown) -> Scalar:
        if unknown.kind == "rows":
            number = unknown.operands[0] if unknown.operands else 0
            return self.batches[int(str(number))].total
        if unknown.kind in ("extent", "entry"):
            return self._once(unknown, lambda: self._look_up(unknown))
        a, b = (tf.convert_to_tensor(self.number(each), tf.int64) for each in unknown.dims)
        return _COMPUTED[unknown.kind](a, b)

    def _look_up(self, unknown: Unknown) -> tf.Tensor:
        """Returns the value of an unknown that names an extent or an entry of a tensor."""
        raise NotImplementedError

    def vector(self, entries: Sequence[Dim | Scalar], dtype: tf.DType | None = None) -> Vector:
        """Returns integers as a vector of the graph. Without a dtype: a list if all are known now, otherwise int64."""
        scalars = [self.number(each) if isinstance(each, Dim) else each for each in entries]
        are_known = all(isinstance(each, int) for each in scalars)
        if are_known and dtype is None:
            return scalars
        dtype = dtype or tf.int64

        def make() -> tf.Tensor:
            if are_known:
                return tf.constant(scalars, dtype)
            if dtype == tf.int64:
                return tf.stack([self.scalar(each) for each in scalars])
            return tf.cast(self.vector(scalars), dtype)

        return self._once((dtype, *map(_key, scalars)), make)

    def scalar(self, number: Dim | Scalar, dtype: tf.DType = tf.int64) -> tf.Tensor:
        """Returns an integer as a scalar of the graph."""
        number = self.number(number) if isinstance(number, Dim) else number
        if isinstance(number, int):
            return self._once((dtype, "scalar", number), lambda: tf.constant(number, dtype))
        if dtype == tf.int64:
            return number
        return self._once((dtype, "scalar", number.ref()), lambda: tf.cast(number, dtype))

    def times(self, a: Scalar, b: Scalar) -> Scalar:
        """Returns a product, without an operation if one factor is 1."""
        if isinstance(a, int) and (a == 1 or isinstance(b, int)):
            return b if a == 1 else a * b
        if isinstance(b, int) and b == 1:
            return a
        return self._once(("times", _key(a), _key(b)), lambda: a * b)

    def total(self, numbers: Sequence[Scalar]) -> Scalar:
        """Returns a sum."""
        if len(numbers) == 1 or all(isinstance(each, int) for each in numbers):
            return functools.reduce(operator.add, numbers)
        return self._once(("total", *map(_key, numbers)), lambda: functools.reduce(operator.add, numbers))

    def _once(self, key: Hashable, make: Callable[[], tf.Tensor]) -> tf.Tensor:
        """Returns the same tensor for repeated requests, because a step uses a few shapes thousands of times."""
        key = tf.compat.v1.get_default_graph(), key
        if key not in self._integers:
            with no_dependencies():
                self._integers[key] = make()
        return self._integers[key]


# How an unknown is computed from two others, by its kind (dims.py).
_COMPUTED: dict[str, Callable[[tf.Tensor, tf.Tensor], tf.Tensor]] = {
    "sum": operator.add,
    "product": operator.mul,
    "quotient": operator.floordiv,
    "larger": tf.maximum,
    "smaller": tf.minimum,
}


def _rows(number: int, total: int | tf.Tensor) -> Dim:
    """Returns the extent of a batch; if unknown, an unknown with a separate name for each batch but the first."""
    if isinstance(total, int):
        return Dim(total)
    return Dim.unknown("rows", number) if number else Dim.unknown("rows")


def _key(entry: Scalar) -> Hashable:
    return entry if isinstance(entry, int) else entry.ref()


def no_dependencies() -> AbstractContextManager[None]:
    """Operations built in this context wait only for their inputs."""
    # Redistribution belongs to no operation of the program; if it waited like one, it could not overlap with others.
    context: AbstractContextManager[None] = tf.control_dependencies(None)
    return context
