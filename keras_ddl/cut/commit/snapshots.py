"""Undoes a failed step on a rank, or completes it if other ranks have committed it.

Variables that a step writes before its commit are copied first, to undo the step. New values of variables that only
this rank has are staged, to complete it.
"""

from __future__ import annotations

from collections.abc import Hashable

from keras_ddl.compat import tensorflow as tf_compat
from keras_ddl.compat.tensorflow import tf


class _Values:
    """Values of variables, kept in other variables (`copies`) while a flag is set. The flag is a variable, too."""

    def __init__(self) -> None:
        self._copies: list[tuple[tf.Tensor, tf.Tensor, tf.DType]] = []  # handles of the variable and of its copy
        self._made: list[tf.Operation] = []
        self._flag: tf.Tensor | None = None

    def keep(self, handle: tf.Tensor, copy: tf.Tensor, value: tf.Tensor) -> None:
        """Copies, in the step that is traced, a value for a variable."""
        self._copies.append((handle, copy, value.dtype))
        self._made.append(tf.raw_ops.AssignVariableOp(resource=copy, value=value))

    def set_flag(self) -> tf.Operation | None:
        """Sets the flag, in the step that is traced, when all copies are made; None: there are none."""
        if not self._made:
            return None
        self._flag = tf_compat.plain_variable(tf.bool)
        with tf.init_scope():
            self.clear_flag()
        with tf.control_dependencies(self._made):
            return tf.raw_ops.AssignVariableOp(resource=self._flag, value=tf.constant(True))

    def clear_flag(self) -> None:
        if self._flag is not None:
            tf.raw_ops.AssignVariableOp(resource=self._flag, value=tf.constant(False))

    def write_back(self) -> None:
        """Writes the copies to their variables if the flag is set, and clears it. Not in a graph."""
        if self._flag is None or not tf.raw_ops.ReadVariableOp(resource=self._flag, dtype=tf.bool):
            return
        for handle, copy, dtype in self._copies:
            tf.raw_ops.AssignVariableOp(resource=handle, value=tf.raw_ops.ReadVariableOp(resource=copy, dtype=dtype))
        self.clear_flag()


class Snapshots:
    """The copies and staged values of one step, in separate variables.

    A copy shares memory with its original until the original is written; a staged value shares it from then on.

    Args:
        staging: variables for staged values, by the handle of the staged variable. The graphs of a step share them,
            because only one runs at a time; otherwise a graph that seldom runs would keep its last values alive.
    """

    def __init__(self, staging: dict[Hashable, tf.Tensor] | None = None) -> None:
        self._variables = {} if staging is None else staging
        self._before, self._staged = _Values(), _Values()
        self.committed: tf.Operation | None = None  # after it everything is written

    def copy(self, handle: tf.Tensor, dtype: tf.DType) -> None:
        """Copies a variable in the step that is traced, before anything is written."""
        value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)
        self._before.keep(handle, tf_compat.plain_variable(dtype), value)

    def close(self) -> tf.Operation | None:
        """Returns the operation after which originals may be written; None: nothing is copied."""
        return self._before.set_flag()

    def stage(self, handle: tf.Tensor, value: tf.Tensor) -> None:
        """Stores, in the step that is traced, the value that a variable will have after the commit."""
        if handle.ref() not in self._variables:
            self._variables[handle.ref()] = tf_compat.plain_variable(value.dtype)
        self._staged.keep(handle, self._variables[handle.ref()], value)

    def end_stage(self) -> None:
        """Records, in the step that is traced, that staging is complete."""
        with tf.control_dependencies(None):
            self._staged.set_flag()

    def forget(self, committed: tf.Operation) -> None:
        """Records, in the step that is traced, that it has committed."""
        self.committed = committed
        self._before.clear_flag()
        self._staged.clear_flag()

    def restore(self) -> None:
        """Restores the variables' values from the beginning of the step, unless it has committed. Not in a graph."""
        self._before.write_back()

    def complete(self) -> None:
        """Writes the staged values after a step that failed here but was committed by others. Not in a graph."""
        self._staged.write_back()

    def discard(self) -> None:
        """Forgets the staged values of a failed step. Not in a graph."""
        self._staged.clear_flag()
