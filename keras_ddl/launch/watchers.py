"""Reports what happens in a job to its watchers: an event log (events.py), metrics (metrics.py).

observe/monitoring/docs/monitoring.md lists the events.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from keras_ddl.launch.outcome import RankOutcome, signal_name

_TEXT_CHARACTERS = 1000  # of an error


class Watcher(Protocol):
    """Watches a job. The launcher's loop calls the methods, so they must neither block nor raise."""

    def event(self, name: str, fields: Mapping[str, Any]) -> None:
        """Takes an event. fields: JSON values, without unknown ones."""

    def figures(self, rank: int, figures: Mapping[str, Any]) -> None:
        """Takes the figures of a rank's training (strategy/figures.py)."""


class Watchers:
    """All watchers of a job, across its restarts.

    Args:
        figures: a watcher wants the figures of the training.
    """

    def __init__(self, watchers: Sequence[Watcher] = (), *, figures: bool = False) -> None:
        self._watchers, self._figures = tuple(watchers), figures
        self._pids: dict[int, int] = {}

    @property
    def wanted(self) -> dict[str, bool] | None:
        """The news that the ranks' wrappers should send (rank_news.py); None: none."""
        return {"figures": self._figures} if self._watchers else None

    def event(self, name: str, **fields: Any) -> None:
        """Reports an event to all watchers. Fields that are None are left out."""
        known = {key: value for key, value in fields.items() if value is not None}
        for watcher in self._watchers:
            watcher.event(name, known)

    def start(self, **fields: Any) -> None:
        """Takes the beginning of an attempt."""
        self._pids.clear()
        self.event("start", **fields)

    def take(self, outcome: RankOutcome, payload: bytes) -> None:
        """Takes a NEWS frame of a rank."""
        news = json.loads(payload)
        if "pid" in news:
            self._pids[outcome.rank] = news["pid"]
            self.event("rank_start", rank=outcome.rank, host=outcome.host, pid=news["pid"])
        for each in news.get("checkpoints", ()):
            if isinstance(step := each.get("step"), int):
                self.event("checkpoint", rank=outcome.rank, host=outcome.host, step=step, path=str(each.get("path")))
        if "figures" in news:
            for watcher in self._watchers:
                watcher.figures(outcome.rank, news["figures"])

    def rank_end(self, outcome: RankOutcome) -> None:
        """Handles the end of a rank, if its program had started."""
        if outcome.rank not in self._pids or not self._watchers:
            return
        status = outcome.status
        self.event(
            "rank_end",
            rank=outcome.rank,
            host=outcome.host,
            pid=self._pids.pop(outcome.rank),
            status=status if status is not None and status >= 0 else None,
            signal=signal_name(-status) if status is not None and status < 0 else None,
            stopped_by=outcome.stopped_by,
            lost=outcome.is_lost and not outcome.survived,
            error=outcome.full_error[:_TEXT_CHARACTERS] or None,
        )
