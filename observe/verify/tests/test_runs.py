"""How `keras-ddl verify` starts runs: their environment, and the directory for --keep."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from keras_ddl.errors import ConfigError
from keras_ddl.launch.job import JobResult
from keras_ddl.verify import runs
from keras_ddl.verify.command import command
from keras_ddl.verify.recording import Plan


class Loop:
    """Replaces RestartLoop: stores the job, and starts nothing."""

    made: Any = None

    def __init__(self, job: Any, shown: Any) -> None:
        Loop.made = job

    def run(self, signals: Any) -> JobResult:
        return JobResult([])


@pytest.mark.parametrize("name", ["KERAS_MAX_STEPS_PER_EPOCH", "PYTHONHASHSEED"])
def test_environment_takes_precedence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    monkeypatch.setattr(runs, "RestartLoop", Loop)
    monkeypatch.chdir(tmp_path)

    def value(folder: str, **environment: str) -> str:
        runs.run(runs.Program(["true"], environment, 10.0, 5), 1, Plan(3), tmp_path / folder)
        return str(Loop.made.environment[name])

    monkeypatch.delenv(name, raising=False)
    assert value("default") == {"KERAS_MAX_STEPS_PER_EPOCH": "5", "PYTHONHASHSEED": "0"}[name]
    monkeypatch.setenv(name, "3")
    assert value("inherited") == "3"
    assert value("given", **{name: "4"}) == "4"


def test_keep_refuses_a_directory_that_is_not_empty(tmp_path: Path) -> None:
    (tmp_path / "run-1").mkdir()
    rest = "which contains run-1. Empty the directory, or name another one."
    with pytest.raises(ConfigError, match=re.escape(f"Received: {tmp_path}, {rest}")):
        command.main(["--keep", str(tmp_path), "--", "true"], standalone_mode=False)
