"""Whose variable is being created: the program's, or Keras's, which aggregates its own."""

from __future__ import annotations

from contextlib import AbstractContextManager
from contextvars import ContextVar

from keras_ddl.compat.context import setting

_of_keras: ContextVar[bool] = ContextVar("keras_ddl_variable_of_keras", default=False)


def of_keras() -> AbstractContextManager[None]:
    """Returns a context in which variables are made for Keras."""
    return setting(_of_keras, True)


def is_of_the_program() -> bool:
    """Whether a variable that is made now is the program's."""
    return not _of_keras.get()
