"""Undoes a failed step on a rank, or completes it if other ranks have committed it.

Variables that a step writes before its commit are copied first, to undo the step. New values of variables that only
this rank has are staged, to complete it.
"""

from __future__ import annotations

from collections.abc import Hashable

from keras_ddl.compat import tensorflow as tf_compat
from keras_ddl.compat.tensorflow import tf


class Snapshots:
    """The copies and staged values of one step, in separate variables. A copy shares memory with its original until the
    original is written; a staged value shares it from then on.

    Args:
        staging: variables for staged values, by the handle of the staged variable. The graphs of a step share them,
            because only one runs at a time; otherwise a graph that seldom runs would keep its last values alive.
    """

    def __init__(self, staging: dict[Hashable, tf.Tensor] | None = None) -> None:
        self._variables = {} if staging is None else staging
        self._copies: list[tuple[tf.Tensor, tf.Tensor, tf.DType]] = []  # handles of the original and of its copy
        self._made: list[tf.Operation] = []
        self.committed: tf.Operation | None = None  # after it everything is written
        # Handles of bools: the copies, or the staged values, are of a step that has begun and not committed.
        self._is_open: tf.Tensor | None = None
        self._is_staged: tf.Tensor | None = None
        self._staged: list[tuple[tf.Tensor, tf.Tensor, tf.DType]] = []  # handles of the variable and of its new value
        self._staging: list[tf.Operation] = []

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

    def stage(self, handle: tf.Tensor, value: tf.Tensor) -> None:
        """Stores, in the step that is traced, the value that a variable will have after the commit."""
        if handle.ref() not in self._variables:
            self._variables[handle.ref()] = tf_compat.plain_variable(value.dtype)
        staged = self._variables[handle.ref()]
        self._staged.append((handle, staged, value.dtype))
        self._staging.append(tf.raw_ops.AssignVariableOp(resource=staged, value=value))

    def end_stage(self) -> None:
        """Records, in the step that is traced, that staging is complete."""
        if not self._staging:
            return
        self._is_staged = tf_compat.plain_variable(tf.bool)
        with tf.init_scope():
            tf.raw_ops.AssignVariableOp(resource=self._is_staged, value=tf.constant(False))
        with tf.control_dependencies(None), tf.control_dependencies(self._staging):
            tf.raw_ops.AssignVariableOp(resource=self._is_staged, value=tf.constant(True))

    def forget(self, committed: tf.Operation) -> None:
        """Records, in the step that is traced, that it has committed."""
        self.committed = committed
        for flag in (self._is_open, self._is_staged):
            if flag is not None:
                tf.raw_ops.AssignVariableOp(resource=flag, value=tf.constant(False))

    def restore(self) -> None:
        """Restores the variables' values from the beginning of the step, unless it has committed. Not in a graph."""
        if self._is_open is None or not tf.raw_ops.ReadVariableOp(resource=self._is_open, dtype=tf.bool):
            return
        for handle, copy, dtype in self._copies:
            tf.raw_ops.AssignVariableOp(resource=handle, value=tf.raw_ops.ReadVariableOp(resource=copy, dtype=dtype))
        tf.raw_ops.AssignVariableOp(resource=self._is_open, value=tf.constant(False))

    def complete(self) -> None:
        """Writes the staged values after a step that failed here but was committed by others. Not in a graph."""
        if self._is_staged is None or not tf.raw_ops.ReadVariableOp(resource=self._is_staged, dtype=tf.bool):
            return
        for handle, staged, dtype in self._staged:
            tf.raw_ops.AssignVariableOp(resource=handle, value=tf.raw_ops.ReadVariableOp(resource=staged, dtype=dtype))
        self.discard()

    def discard(self) -> None:
        """Forgets the staged values of a failed step. Not in a graph."""
        if self._is_staged is not None:
            tf.raw_ops.AssignVariableOp(resource=self._is_staged, value=tf.constant(False))
