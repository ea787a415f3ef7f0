"""Reports a job's events to its watchers: the event log (events.py) and the metrics (metrics.py).

observe/monitoring/docs/monitoring.md lists the events.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from keras_ddl.launch.outcome import RankOutcome, signal_name
from keras_ddl.link.kinds import Kind

_TEXT_CHARACTERS = 1000  # the length of an error text


class Watcher(Protocol):
    """Watches a job. The launcher's loop calls the methods, so they must neither block nor raise."""

    def event(self, name: str, fields: Mapping[str, Any]) -> None:
        """Handles an event. fields: JSON values; unknown values are left out."""

    def figures(self, rank: int, figures: Mapping[str, Any]) -> None:
        """Handles the figures of a rank's training (strategy/figures.py)."""


class Watchers:
    """All watchers of a job, across its restarts.

    Attributes:
        want_figures: whether a watcher wants the training figures.
    """

    def __init__(self, watchers: Sequence[Watcher] = (), *, figures: bool = False) -> None:
        self._watchers, self.want_figures = tuple(watchers), figures
        self._pids: dict[int, int] = {}

    def event(self, name: str, **fields: Any) -> None:
        """Reports an event to all watchers. Fields that are None are left out."""
        known = {key: value for key, value in fields.items() if value is not None}
        for watcher in self._watchers:
            watcher.event(name, known)

    def start(self, **fields: Any) -> None:
        """Reports that an attempt begins."""
        self._pids.clear()
        self.event("start", **fields)

    def take(self, outcome: RankOutcome, kind: Kind, payload: bytes) -> None:
        """Handles a frame from a rank."""
        if kind is Kind.STARTED:
            pid = self._pids[outcome.rank] = json.loads(payload)["pid"]
            self.event("rank_start", rank=outcome.rank, host=outcome.host, pid=pid)
        elif kind is Kind.CHECKPOINT and (checkpoint := json.loads(payload))["is_new"]:
            step, path = checkpoint["step"], checkpoint["path"]
            self.event("checkpoint", rank=outcome.rank, host=outcome.host, step=step, path=path)
        elif kind is Kind.FIGURES:
            for watcher in self._watchers:
                watcher.figures(outcome.rank, json.loads(payload))

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
            lost=outcome.is_lost and not outcome.job_continues,
            error=outcome.full_error[:_TEXT_CHARACTERS] or None,
        )
