"""Context variables: values that are set for this thread inside a `with` block."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Generic, TypeVar

T = TypeVar("T")


@contextlib.contextmanager
def setting(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Sets `variable` to `value` inside the block, like `with variable.set(value):` in Python 3.14."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


class Setting(Generic[T]):
    """A context variable. Inside `with inference(True): ...`, `inference.get()` is True."""

    def __init__(self, name: str, default: T) -> None:
        self._variable = ContextVar(f"keras_ddl_{name}", default=default)
        self.get = self._variable.get

    def __call__(self, value: T) -> contextlib.AbstractContextManager[None]:
        return setting(self._variable, value)
