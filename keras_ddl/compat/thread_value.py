"""What holds in a thread while a block of code runs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any


class ThreadValue:
    """A value that each thread has for itself: `default`, or another one inside `with value.set_to(...)`."""

    def __init__(self, default: Any = None) -> None:
        self._default = default
        self._thread = threading.local()

    def get(self) -> Any:
        return getattr(self._thread, "value", self._default)

    @contextlib.contextmanager
    def set_to(self, value: Any) -> Iterator[None]:
        """Inside, this thread has `value`; afterwards what it had before."""
        before = self.get()
        self._thread.value = value
        try:
            yield
        finally:
            self._thread.value = before
