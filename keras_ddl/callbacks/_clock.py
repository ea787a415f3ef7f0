"""When so many seconds have passed, told alike on all ranks, at the cost of few agreements."""

from __future__ import annotations

import time

from keras_ddl.communicator.first_rank import on_first_rank


class Clock:
    """Rank 0's clock. The ranks look at it together, each time half of what is left away, as the steps go."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._began = self._since = time.monotonic()
        self._steps = self._next_look = 0

    def is_due(self) -> bool:
        """Whether the seconds have passed since `restart`. To be called at every step; COLLECTIVE at some of them."""
        self._steps += 1
        if self._steps < self._next_look:
            return False
        due, steps = on_first_rank(self._look, "Checkpoint/clock")
        self._next_look = self._steps + steps
        return due

    def restart(self) -> None:
        self._since = time.monotonic()

    def _look(self) -> tuple[bool, int]:
        now = time.monotonic()
        left = self._seconds - (now - self._since)
        step = max((now - self._began) / self._steps, 1e-6)
        return left <= 0, max(1, int(max(left, 0) / 2 / step))
