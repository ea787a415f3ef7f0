"""What a rank leaves for its launcher, and what watchers are told of it, without ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from keras_ddl.files import last_checkpoint, news
from keras_ddl.launch import rank_news
from keras_ddl.launch.outcome import RankOutcome
from keras_ddl.launch.rank_news import RankNews
from keras_ddl.launch.watchers import Watchers


class Notes:
    """A watcher that keeps what it is told."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.last_figures: dict[int, dict[str, Any]] = {}

    def event(self, name: str, fields: dict[str, Any]) -> None:
        self.events.append((name, fields))

    def figures(self, rank: int, figures: dict[str, Any]) -> None:
        self.last_figures[rank] = figures


def test_news_of_a_rank_come_once_a_second_and_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_news.time, "monotonic", lambda: clock[0])
    clock, own = [10.0], RankNews(tmp_path, {"figures": True})
    assert own.take() == {}
    news.write_figures(str(tmp_path), {"steps": 3, "logs": {"loss": 0.5}})
    monkeypatch.setattr(last_checkpoint, "_known", {})
    for step in (1, 2):
        last_checkpoint.note(tmp_path / f"step-{step}", step, True, str(tmp_path), is_news=True)
    assert own.take() == {}
    clock[0] += 1.0
    taken = own.take()
    assert taken["figures"] == {"steps": 3, "logs": {"loss": 0.5}}
    assert [(each["step"], each["path"]) for each in taken["checkpoints"]] == [
        (step, str(tmp_path / f"step-{step}")) for step in (1, 2)
    ]
    clock[0] += 1.0
    assert own.take() == {}
    last_checkpoint.note(tmp_path / "step-9", 9, True, str(tmp_path))  # resumed from it
    last_checkpoint.note(tmp_path / "step-3", 3, True, str(tmp_path), is_news=True)
    assert own.take() == {}
    assert [each["step"] for each in own.take(is_last=True)["checkpoints"]] == [3]


def test_news_that_nobody_wants_are_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(last_checkpoint, "_known", {})
    last_checkpoint.note(tmp_path / "step-1", 1, True, str(tmp_path), is_news=True)
    news.write_figures(str(tmp_path), {"steps": 1})
    assert not news.is_wanted(str(tmp_path), news.FIGURES) and not news.is_wanted(None, news.FIGURES)
    assert [path.name for path in tmp_path.iterdir()] == [last_checkpoint.FILE]
    RankNews(tmp_path, {"figures": False})
    assert not news.is_wanted(str(tmp_path), news.FIGURES) and news.is_wanted(str(tmp_path), news.CHECKPOINTS)


@pytest.mark.parametrize("what", ["torn", "empty", "junk", "no dict"])
def test_news_that_are_damaged_are_none(tmp_path: Path, what: str) -> None:
    path = tmp_path / news.FIGURES
    path.touch()
    news.write_figures(str(tmp_path), {"steps": 123} if what != "no dict" else [])  # type: ignore[arg-type]
    data = path.read_bytes()
    path.write_bytes({"torn": data[:-3] + b"99}", "empty": b"", "junk": b"x" * 40, "no dict": data}[what])
    assert news.read_figures(tmp_path) is None


def test_watchers_tell_of_checkpoints_and_of_ranks_that_had_started() -> None:
    notes = Notes()
    watchers = Watchers([notes], figures=True)
    assert watchers.wanted == {"figures": True} and Watchers().wanted is None
    watchers.start(restart=0, ranks=3)
    outcomes = [RankOutcome(rank, host="h", status=status) for rank, status in enumerate((3, -9, None))]
    for outcome in outcomes[:2]:
        watchers.take(outcome, json.dumps({"pid": 70 + outcome.rank}).encode())
    watchers.take(outcomes[0], json.dumps({"checkpoints": [{"path": "/c/1", "step": 1}, {"path": 5}]}).encode())
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
