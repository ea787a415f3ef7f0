"""Measures how long a process's main thread spends in each phase. A phase's time excludes the phases inside it."""

from __future__ import annotations

import functools
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Phases:
    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._inside: list[float] = []  # for each phase that is open: seconds of the phases inside it

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the seconds of a block to the phase `name`."""
        start = time.perf_counter()
        self._inside.append(0.0)
        try:
            yield
        finally:
            elapsed = time.perf_counter() - start
            self.seconds[name] += elapsed - self._inside.pop()
            if self._inside:
                self._inside[-1] += elapsed

    def watch(self, owner: Any, attribute: str, name: str) -> None:
        """Adds the seconds of all calls of a function or method to the phase `name`."""
        function = getattr(owner, attribute)

        @functools.wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():
                return function(*args, **kwargs)
            with self.phase(name):
                return function(*args, **kwargs)

        setattr(owner, attribute, watched)
