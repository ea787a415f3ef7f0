"""Where the time of a process goes: seconds of its main thread by phase, each without the phases inside it."""

from __future__ import annotations

import functools
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Phases:
    """Adds up the seconds that the main thread spends in each phase."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._inside: list[float] = []  # of phases that are under way: seconds of those inside them

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Counts a block as `name`, but for the phases inside it."""
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
        """Counts calls of a function of a module, or of a method, as `name`."""
        function = getattr(owner, attribute)

        @functools.wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():
                return function(*args, **kwargs)
            with self.phase(name):
                return function(*args, **kwargs)

        setattr(owner, attribute, watched)
