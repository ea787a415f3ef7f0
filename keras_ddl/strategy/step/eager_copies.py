"""Undoes the writes of an eager step that fails, and repeats them if other ranks have committed the step.

A traced step shows which variables it uses. An eager step does not: it may write variables of a model that only its
closure knows, or Keras's global seed generator. So all variables of the process are copied.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

from keras_ddl.compat import tensorflow as tf_compat
from keras_ddl.compat.tensorflow import ResourceVariable, tf

_OWN = "keras_ddl_"  # prefix of the names of keras_ddl's own variables
_Copy = tuple[tf.Tensor, tf.Tensor]  # handle, value


class EagerCopies:
    """The values of variables before and after a step.

    Cost: in each step, every object is visited and every variable read; while the step runs, memory for a copy of
        everything that it writes.
    """

    def __init__(self) -> None:
        self._before: list[_Copy] = []
        self._after: list[_Copy] = []

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Copies variables before and after the step that runs in the block, including variables that it makes."""
        self._before = [copy for each in _variables() for copy in _copies_of(each)]

        def note(make: Callable[..., Any], **kwargs: Any) -> Any:
            made = make(**kwargs)
            self._before += _copies_of(made)
            return made

        with tf.variable_creator_scope(note):
            yield

    def undo(self) -> None:
        """Gives all variables the values that they had before the step."""
        if self._before:
            self._after = [(handle, _read(handle, value.dtype)) for handle, value in self._before]
            _write(self._before)
            self._before = []

    def redo(self) -> None:
        """Gives all variables the values that the step computed, after it was undone."""
        _write(self._after)
        self.forget()

    def forget(self) -> None:
        """Forgets all copies, because the step has committed or a new one begins."""
        self._before, self._after = [], []


def _variables() -> Iterator[Any]:
    for each in gc.get_objects():
        if issubclass(type(each), ResourceVariable):  # isinstance would dereference weak proxies
            yield each


def _copies_of(variable: Any) -> list[_Copy]:
    """Returns [copy] for a variable with its own value, else []."""
    is_plain = issubclass(type(variable), ResourceVariable) and type(variable).handle is ResourceVariable.handle
    handle = getattr(variable, "handle", None) if is_plain else None
    if not tf_compat.is_eager(handle) or variable.dtype in (tf.resource, tf.variant) or variable.name.startswith(_OWN):
        return []
    try:
        return [(handle, _read(handle, variable.dtype))]
    except (tf.errors.FailedPreconditionError, tf.errors.NotFoundError):  # the variable has no value yet
        return []


def _read(handle: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    return tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)


def _write(copies: list[_Copy]) -> None:
    for handle, value in copies:
        tf.raw_ops.AssignVariableOp(resource=handle, value=value)
