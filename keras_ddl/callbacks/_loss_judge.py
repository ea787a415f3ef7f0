"""Decides from the losses of windows whether a training diverges. It uses nothing else, so all ranks agree."""

from __future__ import annotations

import math

_LEAST = 0.01  # of the first window's loss: below, a rise is noise


class LossJudge:
    """Judges the loss of one window after another. Arguments: as in DivergenceGuard.

    Attributes:
        is_good: whether the state after the last window may be kept. False if the window is bad, and if it is above
            the ceiling within the grace period.
    """

    def __init__(self, rise: float | None, ceiling: float | None, grace: int) -> None:
        self.rise, self.ceiling, self.grace = rise, ceiling, grace
        self.is_good = False
        self._windows = 0  # since the beginning, or since `go_back`
        self._first: float | None = None
        self._lowest: float | None = None
        self._before: tuple[float | None, float | None] = (None, None)  # `_lowest` at the last two good windows

    def problem(self, loss: float) -> str | None:
        """Returns what is wrong with this window, for a message, or None."""
        self._windows += 1
        under = self.ceiling is None or loss < self.ceiling
        problem = self._problem(loss, under)
        self.is_good = problem is None and under
        if problem is None:
            self._first = loss if self._first is None else self._first
            self._lowest = loss if self._lowest is None else min(loss, self._lowest)
        if self.is_good:
            self._before = (self._before[1], self._lowest)
        return problem

    def go_back(self) -> None:
        """Restores the judge's state from before the last good window, because training goes back there."""
        self._windows = 0
        self._lowest = self._first if self._before[0] is None else self._before[0]
        self._before = (self._before[0], self._before[0])

    def _problem(self, loss: float, under: bool) -> str | None:
        lowest = (
            "no earlier window was good" if self._lowest is None else f"the lowest earlier loss was {self._lowest:g}"
        )
        if not math.isfinite(loss):
            return lowest
        if loss > self._highest():
            return lowest
        if not under and self._windows >= self.grace:
            return f"it must be below {self.ceiling:g} by then"
        return None

    def _highest(self) -> float:
        if self.rise is None or self._lowest is None or self._first is None:
            return math.inf
        return self._lowest + self.rise * max(abs(self._lowest), _LEAST * abs(self._first))
