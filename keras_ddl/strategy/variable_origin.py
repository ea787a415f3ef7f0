"""Marks who creates a variable: the program or Keras (which aggregates its own), and all ranks or one alone."""

from __future__ import annotations

from contextlib import AbstractContextManager
from contextvars import ContextVar

from keras_ddl.compat.context import setting

_of_keras: ContextVar[bool] = ContextVar("keras_ddl_variable_of_keras", default=False)
_of_one_rank: ContextVar[bool] = ContextVar("keras_ddl_variable_of_one_rank", default=False)


def of_keras() -> AbstractContextManager[None]:
    return setting(_of_keras, True)


def is_of_the_program() -> bool:
    """Whether a variable that is made now is the program's."""
    return not _of_keras.get()


def of_one_rank() -> AbstractContextManager[None]:
    """Returns a context in which a rank may make variables alone: inside a scope making one is otherwise COLLECTIVE."""
    return setting(_of_one_rank, True)


def of_all_ranks() -> AbstractContextManager[None]:
    """Returns a context in which all ranks make variables, also where a rank might do so alone, as in callbacks."""
    return setting(_of_one_rank, False)


def is_of_all_ranks() -> bool:
    """Whether all ranks make the variable that is made now, and agree on its first value."""
    return not _of_one_rank.get()
