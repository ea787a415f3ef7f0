"""What Python 3.14 has of context variables: a value inside a block of code."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")


@contextlib.contextmanager
def setting(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Inside, this thread reads `value` of `variable`: `with variable.set(value):` of Python 3.14."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
