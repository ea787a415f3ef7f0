"""Extents as numbers of the rank's graph, where they are not known before the step runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.dims import Dim, Unknown

if TYPE_CHECKING:
    from keras_ddl.cut.held import Held


class Scalars:
    """Computes unknowns in the graph that is being made, each once."""

    def __init__(self, held: Held) -> None:
        self._held = held
        self._made: dict[Any, Any] = {}

    def of(self, wanted: Dim) -> Any:
        """Returns an int or an int64 scalar. Raises: Waiting, where it depends on a sum to come."""
        if wanted.number is not None:
            return wanted.number
        graph = tf.compat.v1.get_default_graph()
        if (graph, wanted) not in self._made:
            factors = [self._unknown(each) for each in wanted.unknowns]
            with tf.control_dependencies(None):
                found = factors[0]
                for each in factors[1:]:
                    found = found * each
                self._made[graph, wanted] = found if wanted.factor == 1 else found * wanted.factor
        return self._made[graph, wanted]

    def _unknown(self, unknown: Unknown) -> Any:
        if unknown.kind == "rows":
            return self._held.batch.total
        if unknown.kind in ("extent", "entry"):
            return self._looked_up(unknown)
        with tf.control_dependencies(None):
            a, b = (self.of(each) for each in unknown.operands)
            a, b = tf.convert_to_tensor(a, tf.int64), tf.convert_to_tensor(b, tf.int64)
            if unknown.kind == "sum":
                return a + b
            if unknown.kind == "product":
                return a * b
            if unknown.kind == "quotient":
                return a // b
            return tf.maximum(a, b) if unknown.kind == "larger" else tf.minimum(a, b)

    def _looked_up(self, unknown: Unknown) -> Any:
        key, at = unknown.operands
        value = self._held.extents.named.get(key)
        if value is None:
            return self._held.number_outside(unknown)
        graph = tf.compat.v1.get_default_graph()
        if (graph, unknown) not in self._made:
            if unknown.kind == "extent":
                # An extent without a name of its own is not that of a cut axis: what is held has it, too.
                held = self._held.held(value)
                with tf.control_dependencies(None):
                    found = tf.shape(held, out_type=tf.int64)[at]
            else:
                whole = self._held.whole(value)
                with tf.control_dependencies(None):
                    found = tf.cast(tf.reshape(whole, [-1])[at], tf.int64)
            self._made[graph, unknown] = found
        return self._made[graph, unknown]

    def vector(self, entries: Sequence[Any], dtype: tf.DType | None = None) -> Any:
        """Returns ints and int64 scalars as a vector of the graph; without a dtype, ints alone as they are.

        The same tensor when asked again: a step names the shapes of a few tensors thousands of times.
        """
        numbers = all(isinstance(each, int) for each in entries)
        if numbers and dtype is None:
            return list(entries)
        dtype = dtype or tf.int64
        key = tf.compat.v1.get_default_graph(), dtype, tuple(map(_key, entries))
        if key not in self._made:
            with tf.control_dependencies(None):
                if numbers:
                    made = tf.constant(list(entries), dtype)
                elif dtype == tf.int64:
                    made = tf.stack([self.scalar(each) for each in entries])
                else:
                    made = tf.cast(self.vector(entries), dtype)
            self._made[key] = made
        return self._made[key]

    def scalar(self, number: Any, dtype: tf.DType = tf.int64) -> tf.Tensor:
        """Returns an int or an int64 scalar as a scalar of the graph; the same tensor when asked again."""
        if not isinstance(number, int) and dtype == tf.int64:
            return number
        key = tf.compat.v1.get_default_graph(), dtype, "scalar", _key(number)
        if key not in self._made:
            with tf.control_dependencies(None):
                self._made[key] = tf.constant(number, dtype) if isinstance(number, int) else tf.cast(number, dtype)
        return self._made[key]

    def times(self, a: Any, b: Any) -> Any:
        """Returns the product of ints or int64 scalars; the same tensor when asked again."""
        key = tf.compat.v1.get_default_graph(), "times", _key(a), _key(b)
        if key not in self._made:
            with tf.control_dependencies(None):
                self._made[key] = times(a, b)
        return self._made[key]


def _key(entry: Any) -> Any:
    return entry if isinstance(entry, int) else entry.ref()


def times(a: Any, b: Any) -> Any:
    """Returns the product of ints or int64 scalars; no operation where one is 1."""
    if isinstance(a, int) and a == 1:
        return b
    if isinstance(b, int) and b == 1:
        return a
    return a * b
