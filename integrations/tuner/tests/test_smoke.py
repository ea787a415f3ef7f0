"""keras_ddl.tuner on a rank other than 0, with a stand-in for KerasTuner's tuner.

tests/project/works_with tests the real one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import keras_ddl
from keras_ddl import communicator
from keras_ddl.errors import ConfigError, RankError, RankMismatchError


class FatalError(Exception):
    pass


class FatalRuntimeError(FatalError):
    pass


class FailedTrialError(Exception):
    pass


ERRORS = SimpleNamespace(FatalError=FatalError, FatalRuntimeError=FatalRuntimeError, FailedTrialError=FailedTrialError)


class Oracle:
    def __init__(self) -> None:
        self.verbose, self.results = 1, []

    def populate_space(self, trial_id: str) -> Any:
        return f"rank 1's choice for {trial_id}"

    def update_trial(self, trial_id: str, metrics: Any, step: int = 0) -> None:
        self.results.append((trial_id, metrics, step))

    def end_trial(self, trial: Any) -> None:
        print("table")


class Tuner:
    """Sets the attributes of a KerasTuner tuner, in the same order."""

    def __init__(self, work: Any, directory: str | None = None) -> None:
        self.oracle = Oracle()
        self.work = work
        self.directory = directory or "."
        self.project_name = "project"
        self.read = {path.name: path.read_text() for path in Path(self.directory, "project").glob("*")}
        print("Reloading")

    def run_trial(self, trial: Any) -> Any:
        return self.work()

    def search(self, **kwargs: Any) -> Any:
        return kwargs

    def results_summary(self) -> None:
        print("table")

    def _get_checkpoint_fname(self, trial_id: str) -> str:
        return str(Path(self.directory, "project", f"trial_{trial_id}", "weights"))


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Returns name of a collective -> its result in this process, rank 1 of 2."""
    answers: dict[str, Any] = {"integrations/tuner/project/notes": ({"oracle.json": "{}"}, None)}
    monkeypatch.setitem(sys.modules, "keras_tuner", SimpleNamespace(errors=ERRORS))
    for name, value in {"is_initialized": True, "size": 2, "rank": 1}.items():
        monkeypatch.setattr(communicator, name, lambda value=value: value)
    monkeypatch.setattr(communicator, "as_one", lambda run: run())
    monkeypatch.setattr(communicator, "broadcast_object", lambda value, name: answers[name])
    monkeypatch.setattr(communicator, "all_gather_object", lambda mine, name: [answers[name], mine])
    yield answers


def made(directory: Path, work: Any = lambda: "result") -> Any:
    return keras_ddl.tuner.on_all_ranks(Tuner)(work, directory=str(directory))


def test_other_rank_writes_to_its_own_copy_of_rank_0s_folder(
    answers: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "of the launcher"
    run_dir.mkdir()
    monkeypatch.setenv("KERAS_DDL_RUN_DIR", str(run_dir))
    tuner = made(tmp_path)
    assert Path(tuner.directory).parent == run_dir, "where it is removed, whatever becomes of the rank"
    assert tuner.read == {"oracle.json": "{}"}
    assert tuner._get_checkpoint_fname("2") == str(tmp_path / "project" / "trial_2" / "weights")
    tuner.results_summary()
    tuner.oracle.end_trial(None)
    assert tuner.search(epochs=2, verbose=2) == {"epochs": 2, "verbose": 0} and tuner.oracle.verbose == 0
    assert capsys.readouterr().out == ""


def test_rank_0_chooses_and_its_results_count(answers: Any, tmp_path: Path) -> None:
    oracle = made(tmp_path).oracle
    answers["integrations/tuner/trial"] = ("rank 0's choice", None)
    assert oracle.populate_space("0") == "rank 0's choice"
    answers["integrations/tuner/trial"] = (None, ValueError("no space"))
    with pytest.raises(ValueError, match="^no space$"):
        oracle.populate_space("1")
    answers["integrations/tuner/results"] = ({"val_loss": 0.5}, 3)
    oracle.update_trial("0", {"val_loss": 0.5000001}, step=2)
    assert oracle.results == [("0", {"val_loss": 0.5}, 3)]


def test_trial_that_fails_on_one_rank_fails_on_all(answers: Any, tmp_path: Path) -> None:
    failed = "integrations/tuner/failed"
    answers[failed] = None
    assert made(tmp_path).run_trial(None) == "result"
    for theirs, kind in (((False, False), RankError), ((False, True), FailedTrialError), ((True, False), FatalError)):
        answers[failed] = (*theirs, "MemoryError: too large")
        with pytest.raises(kind, match="^rank 0: MemoryError: too large$"):
            made(tmp_path).run_trial(None)

    def fail(error: Exception) -> None:
        raise error

    answers[failed] = None
    with pytest.raises(ZeroDivisionError):
        made(tmp_path, lambda: 1 // 0).run_trial(None)
    with pytest.raises(FatalRuntimeError, match="RankMismatchError: other models"):  # no other trial could work
        made(tmp_path, lambda: fail(RankMismatchError("other models"))).run_trial(None)


def test_separate_trials_per_process_are_refused(answers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERASTUNER_ORACLE_IP", "10.0.0.1")
    with pytest.raises(ConfigError, match=r"KERASTUNER_ORACLE_IP=10.0.0.1 \(rank 1\).*Unset KERASTUNER_ORACLE_IP"):
        made(tmp_path)


def test_one_rank_searches_as_before(tmp_path: Path) -> None:
    tuner = made(tmp_path)
    assert tuner.directory == str(tmp_path) and tuner.oracle.populate_space("0").startswith("rank 1's")
    assert type(tuner).__name__ == "Tuner" and keras_ddl.tuner.on_all_ranks(type(tuner)) is type(tuner)
