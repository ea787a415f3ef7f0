"""What a step that fails leaves on a rank.

There are copies of the variables that the step wrote before its commit, to undo it, and staged values of variables that
only this rank has, to complete the step if other ranks have committed it.
"""

from __future__ import annotations

from collections.abc import Hashable

from keras_ddl.compat import tensorflow as tf_compat
from keras_ddl.compat.tensorflow import tf


class Snapshots:
    """The copies and staged values of one step, in variables of this rank's own. Copies share memory with the originals
    until those are written; staged values do so from then on.

    Args:
        staging: variables for staged values, by the handle of the variable that they are for. Graphs of one step of
            which one runs at a time share them: else the values of a graph that runs seldom would be kept for it.
    """

    def __init__(self, staging: dict[Hashable, tf.Tensor] | None = None) -> None:
        self._variables = {} if staging is None else staging
        self._copies: list[tuple[tf.Tensor, tf.Tensor, tf.DType]] = []  # handles of the original and of its copy
        self._made: list[tf.Operation] = []
        self.committed: tf.Operation | None = None  # after it everything is written
        self._is_open: tf.Tensor | None = (
            None  # handle of a bool: the copies are those of a step that has begun and not committed
        )
        self._staged: list[tuple[tf.Tensor, tf.Tensor, tf.DType]] = []  # handles of the variable and of its new value
        self._staging: list[tf.Operation] = []
        self._is_staged: tf.Tensor | None = None  # handle of a bool, likewise

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
        """Keeps, in the step that is traced, what a variable will hold when the step has committed."""
        if handle.ref() not in self._variables:
            self._variables[handle.ref()] = tf_compat.plain_variable(value.dtype)
        staged = self._variables[handle.ref()]
        self._staged.append((handle, staged, value.dtype))
        self._staging.append(tf.raw_ops.AssignVariableOp(resource=staged, value=value))

    def end_stage(self) -> None:
        """Says, in the step that is traced, that all values are staged that will be."""
        if not self._staging:
            return
        self._is_staged = tf_compat.plain_variable(tf.bool)
        with tf.init_scope():
            tf.raw_ops.AssignVariableOp(resource=self._is_staged, value=tf.constant(False))
        with tf.control_dependencies(None), tf.control_dependencies(self._staging):
            tf.raw_ops.AssignVariableOp(resource=self._is_staged, value=tf.constant(True))

    def forget(self, committed: tf.Operation) -> None:
        """Says, in the step that is traced, that it has committed."""
        self.committed = committed
        for flag in (self._is_open, self._is_staged):
            if flag is not None:
                tf.raw_ops.AssignVariableOp(resource=flag, value=tf.constant(False))

    def restore(self) -> None:
        """Restores what the variables were when the step began, unless it has committed. Not in a graph."""
        if self._is_open is None or not tf.raw_ops.ReadVariableOp(resource=self._is_open, dtype=tf.bool):
            return
        for handle, copy, dtype in self._copies:
            tf.raw_ops.AssignVariableOp(resource=handle, value=tf.raw_ops.ReadVariableOp(resource=copy, dtype=dtype))
        tf.raw_ops.AssignVariableOp(resource=self._is_open, value=tf.constant(False))

    def complete(self) -> None:
        """Writes what is staged, after a step that failed here and that others have committed. Not in a graph."""
        if self._is_staged is None or not tf.raw_ops.ReadVariableOp(resource=self._is_staged, dtype=tf.bool):
            return
        for handle, staged, dtype in self._staged:
            tf.raw_ops.AssignVariableOp(resource=handle, value=tf.raw_ops.ReadVariableOp(resource=staged, dtype=dtype))
        self.discard()

    def discard(self) -> None:
        """Forgets what a step that failed has staged. Not in a graph."""
        if self._is_staged is not None:
            tf.raw_ops.AssignVariableOp(resource=self._is_staged, value=tf.constant(False))
