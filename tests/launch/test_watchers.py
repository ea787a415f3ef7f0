"""Events that watchers get from the messages of ranks, tested without ranks."""

from __future__ import annotations

import json
from typing import Any

from keras_ddl.launch.outcome import RankOutcome
from keras_ddl.launch.watchers import Watchers
from keras_ddl.link.kinds import Kind


class Recorder:
    """A watcher that stores its events."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.last_figures: dict[int, dict[str, Any]] = {}

    def event(self, name: str, fields: dict[str, Any]) -> None:
        self.events.append((name, fields))

    def figures(self, rank: int, figures: dict[str, Any]) -> None:
        self.last_figures[rank] = figures


def test_watchers_get_checkpoints_and_ends_of_started_ranks() -> None:
    notes = Recorder()
    watchers = Watchers([notes], figures=True)
    assert watchers.want_figures and not Watchers([notes]).want_figures
    watchers.start(restart=0, ranks=3)
    outcomes = [RankOutcome(rank, host="h", status=status) for rank, status in enumerate((3, -9, None))]
    for outcome in outcomes[:2]:
        watchers.take(outcome, Kind.STARTED, json.dumps({"pid": 70 + outcome.rank}).encode())
    for is_new in (False, True):  # resumed from, then written
        checkpoint = {"path": "/c/1", "step": 1, "resume": True, "is_new": is_new}
        watchers.take(outcomes[0], Kind.CHECKPOINT, json.dumps(checkpoint).encode())
    watchers.take(outcomes[1], Kind.FIGURES, b'{"steps": 3}')
    assert notes.last_figures == {1: {"steps": 3}}
    outcomes[0].report = {"summary": "ValueError: bad"}
    for outcome in outcomes * 2:
        watchers.rank_end(outcome)
    names = [(name, fields.get("rank")) for name, fields in notes.events[1:]]
    assert names == [("rank_start", 0), ("rank_start", 1), ("checkpoint", 0), ("rank_end", 0), ("rank_end", 1)]
    assert notes.events[-2][1] == {
        "rank": 0,
        "host": "h",
        "pid": 70,
        "status": 3,
        "lost": False,
        "error": "ValueError: bad",
    }
    assert notes.events[-1][1] == {"rank": 1, "host": "h", "pid": 71, "signal": "SIGKILL", "lost": True}
