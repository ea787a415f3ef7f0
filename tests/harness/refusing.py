"""Checks that a call is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keras_ddl.errors import ConfigError


def refuses(call: Callable[[], Any], *words: str, error: type[Exception] = ConfigError) -> None:
    """Fails unless `call` raises `error` with all of `words` in its message."""
    try:
        call()
    except error as caught:
        assert all(word in str(caught) for word in words), caught
    else:
        raise AssertionError(f"no {error.__name__}")
