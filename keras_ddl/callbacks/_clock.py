"""A timer shared by all ranks, which needs few collectives."""

from __future__ import annotations

import time

from keras_ddl.communicator.first_rank import on_first_rank


class Clock:
    """A timer by rank 0's clock. Each time, the ranks check it together after about half of the steps that remain."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._began = self._since = time.monotonic()
        self._steps = self._next_check = 0

    def is_due(self) -> bool:
        """Whether the seconds have passed since `restart`. Call it at every step; COLLECTIVE at some of them."""
        self._steps += 1
        if self._steps < self._next_check:
            return False
        due, steps = on_first_rank(self._check, "Checkpoint/clock")
        self._next_check = self._steps + steps
        return due

    def restart(self) -> None:
        self._since = time.monotonic()

    def _check(self) -> tuple[bool, int]:
        now = time.monotonic()
        left = self._seconds - (now - self._since)
        step = max((now - self._began) / self._steps, 1e-6)
        return left <= 0, max(1, int(max(left, 0) / 2 / step))
