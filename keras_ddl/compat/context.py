"""Values that are set inside a `with` block, for this thread."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Generic, TypeVar

T = TypeVar("T")


@contextlib.contextmanager
def setting(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Inside, this thread reads `value` of `variable`: `with variable.set(value):` of Python 3.14."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


class Setting(Generic[T]):
    """A context variable: `with inference(True): ...`, inside of which `inference.get()` is True."""

    def __init__(self, name: str, default: T) -> None:
        self._variable = ContextVar(f"keras_ddl_{name}", default=default)
        self.get = self._variable.get

    def __call__(self, value: T) -> contextlib.AbstractContextManager[None]:
        return setting(self._variable, value)
