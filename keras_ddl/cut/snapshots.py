"""Copies of variables that a step writes before it commits; they are restored when it fails."""

from __future__ import annotations

from keras_ddl.compat import tensorflow as tf_compat
from keras_ddl.compat.tensorflow import tf


class Snapshots:
    """The copies of one step, in variables of this rank's own. They share memory with the originals until those are
    written.
    """

    def __init__(self) -> None:
        self._copies: list[tuple[tf.Tensor, tf.Tensor, tf.DType]] = []  # handles of the original and of its copy
        self._made: list[tf.Operation] = []
        self.committed: tf.Operation | None = None  # after it everything is written
        self._is_open: tf.Tensor | None = (
            None  # handle of a bool: the copies are those of a step that has begun and not committed
        )

    def copy(self, handle: tf.Tensor, dtype: tf.DType) -> None:
        """Copies a variable in the step that is traced, before anything is written."""
        copy = tf_compat.plain_variable(dtype)
        self._copies.append((handle, copy, dtype))
        value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)
        self._made.append(tf.raw_ops.AssignVariableOp(resource=copy, value=value))

    def close(self) -> tf.Operation | None:
        """Returns the operation after which originals may be written; None: nothing is copied."""
        if not self._made:
            return None
        self._is_open = tf_compat.plain_variable(tf.bool)
        with tf.init_scope():
            tf.raw_ops.AssignVariableOp(resource=self._is_open, value=tf.constant(False))
        with tf.control_dependencies(self._made):
            return tf.raw_ops.AssignVariableOp(resource=self._is_open, value=tf.constant(True))

    def forget(self, committed: tf.Operation) -> None:
        """Says, in the step that is traced, that it has committed."""
        self.committed = committed
        if self._is_open is not None:
            tf.raw_ops.AssignVariableOp(resource=self._is_open, value=tf.constant(False))

    def restore(self) -> None:
        """Restores what the variables were when the step began, unless it has committed. Not in a graph."""
        if self._is_open is None or not tf.raw_ops.ReadVariableOp(resource=self._is_open, dtype=tf.bool):
            return
        for handle, copy, dtype in self._copies:
            tf.raw_ops.AssignVariableOp(resource=handle, value=tf.raw_ops.ReadVariableOp(resource=copy, dtype=dtype))
        tf.raw_ops.AssignVariableOp(resource=self._is_open, value=tf.constant(False))
