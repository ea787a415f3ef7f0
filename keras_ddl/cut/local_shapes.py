"""Integers of the rank's graph: extents and shapes of global tensors, and of what this rank holds of them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager
from typing import TypeAlias

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.dims import Dim, Unknown, dim
from keras_ddl.cut.placements import Batch, Placement, Sharded

Scalar: TypeAlias = (
    int | tf.Tensor
)  # an int where it is known when the step is traced, else an int64 scalar of the graph
Vector: TypeAlias = list[int] | tf.Tensor


class LocalShapes:
    """Computes extents in the graph that is being built, each once.

    Attributes: batch: the rows of all ranks and of this one. rows: the extent of the global batch.
    """

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.rows = Dim(batch.total) if isinstance(batch.total, int) else Dim.unknown("rows")
        self._integers: dict[Hashable, tf.Tensor] = {}

    def extent(self, placement: Sharded) -> Dim:
        """Returns the extent of the global tensor along the sharded axis."""
        return placement.blocks * self.rows * placement.unit

    def local_extent(self, placement: Sharded) -> Scalar:
        """Returns the extent of this rank's tensor along the sharded axis."""
        return self.times(self.number(placement.blocks * placement.unit), self.batch.local)

    def local_shape(self, dims: Sequence[Dim], placement: Placement, dtype: tf.DType | None = None) -> Vector:
        """Returns the shape of what a rank holds of a tensor of these extents, as `vector` returns integers."""
        shape: list[Dim | Scalar] = [*dims]
        if isinstance(placement, Sharded):
            shape[placement.axis] = self.local_extent(placement)
        return self.vector(shape, dtype)

    def static_local_shape(self, shape: tf.TensorShape, placement: Placement) -> tf.TensorShape:
        """Returns what is known at tracing time of the shape of a rank's tensor, given the global tensor's."""
        if not isinstance(placement, Sharded) or shape.rank is None:
            return shape
        extents, local = shape.as_list(), self.local_extent(placement)
        extents[placement.axis] = local if isinstance(local, int) else None
        return tf.TensorShape(extents)

    def number(self, value: Dim | int) -> Scalar:
        """Returns an extent. Raises: Pending: it depends on a collective to come."""
        wanted = dim(value)
        if wanted.number is not None:
            return wanted.number
        key = tf.compat.v1.get_default_graph(), wanted
        if key not in self._integers:
            factors = [self._unknown(each) for each in wanted.unknowns]
            with tf.control_dependencies(None):
                result = factors[0]
                for each in factors[1:]:
                    result = result * each
                self._integers[key] = result if wanted.factor == 1 else result * wanted.factor
        return self._integers[key]

    def _unknown(self, unknown: Unknown) -> Scalar:
        if unknown.kind == "rows":
            return self.batch.total
        if unknown.kind in ("extent", "entry"):
            key = tf.compat.v1.get_default_graph(), unknown
            if key not in self._integers:
                self._integers[key] = self._look_up(unknown)
            return self._integers[key]
        with tf.control_dependencies(None):
            a, b = (tf.convert_to_tensor(self.number(each), tf.int64) for each in unknown.dims)
            if unknown.kind == "sum":
                return a + b
            if unknown.kind == "product":
                return a * b
            if unknown.kind == "quotient":
                return a // b
            return tf.maximum(a, b) if unknown.kind == "larger" else tf.minimum(a, b)

    def _look_up(self, unknown: Unknown) -> tf.Tensor:
        """Returns an unknown that names an extent of a tensor, or an entry of one."""
        raise NotImplementedError

    def vector(self, entries: Sequence[Dim | Scalar], dtype: tf.DType | None = None) -> Vector:
        """Returns integers as a vector of the graph; without a dtype, those known now as a list, others as int64.

        The same tensor when asked again: a step names the shapes of a few tensors thousands of times.
        """
        scalars = [self.number(each) if isinstance(each, Dim) else each for each in entries]
        are_known = all(isinstance(each, int) for each in scalars)
        if are_known and dtype is None:
            return scalars
        dtype = dtype or tf.int64
        key = tf.compat.v1.get_default_graph(), dtype, tuple(map(_key, scalars))
        if key not in self._integers:
            with tf.control_dependencies(None):
                if are_known:
                    made = tf.constant(scalars, dtype)
                elif dtype == tf.int64:
                    made = tf.stack([self.scalar(each) for each in scalars])
                else:
                    made = tf.cast(self.vector(scalars), dtype)
            self._integers[key] = made
        return self._integers[key]

    def scalar(self, number: Dim | Scalar, dtype: tf.DType = tf.int64) -> tf.Tensor:
        """Returns an integer as a scalar of the graph; the same tensor when asked again."""
        number = self.number(number) if isinstance(number, Dim) else number
        if not isinstance(number, int) and dtype == tf.int64:
            return number
        key = tf.compat.v1.get_default_graph(), dtype, "scalar", _key(number)
        if key not in self._integers:
            with tf.control_dependencies(None):
                made = tf.constant(number, dtype) if isinstance(number, int) else tf.cast(number, dtype)
            self._integers[key] = made
        return self._integers[key]

    def times(self, a: Scalar, b: Scalar) -> Scalar:
        """Returns a product; the same tensor when asked again, and no operation where one factor is 1."""
        if isinstance(a, int) and (a == 1 or isinstance(b, int)):
            return b if a == 1 else a * b
        if isinstance(b, int) and b == 1:
            return a
        key = tf.compat.v1.get_default_graph(), "times", _key(a), _key(b)
        if key not in self._integers:
            with tf.control_dependencies(None):
                self._integers[key] = a * b
        return self._integers[key]


def _key(entry: Scalar) -> Hashable:
    return entry if isinstance(entry, int) else entry.ref()


def no_dependencies() -> AbstractContextManager[None]:
    """What is built in this context waits for no operation but its inputs."""
    # Redistribution belongs to no operation of the program: if it waited as one does, it would not overlap with others.
    context: AbstractContextManager[None] = tf.control_dependencies(None)
    return context
