"""The line printed at the end of the first job on a machine."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from keras_ddl.strategy.keras_patches import first_job


def test_line_is_printed_once_and_tells_where_time_went(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    first_job.say(12.3, 4.4, 6.0, 300)
    told = capsys.readouterr().out
    assert told.startswith("keras_ddl: 12 s until fit began, 4 s for the first step, ") and told.count("\n") == 1
    assert "6 s for 300 more, 20 ms each with validation and callbacks." in told
    first_job.say(1.0, 1.0, 1.0, 1)
    assert capsys.readouterr().out == ""


def test_nothing_is_printed_without_a_usable_cache(
    foreign_directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(foreign_directory))
    first_job.say(1.0, 1.0, 1.0, 0)
    assert capsys.readouterr().out == ""


def test_age_of_the_process_matches_the_clock() -> None:
    before, began = first_job.seconds_since_start(), time.monotonic()
    time.sleep(0.1)
    passed = time.monotonic() - began
    assert before > 0 and abs(first_job.seconds_since_start() - before - passed) < 0.05
    assert before < time.clock_gettime(time.CLOCK_BOOTTIME)
