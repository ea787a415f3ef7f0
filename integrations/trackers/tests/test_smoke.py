"""Tests that MLflow keeps nothing of ranks other than 0."""

import os
from pathlib import Path

import pytest

from keras_ddl.trackers import mlflow_scratch


class Store:
    """MLflow, as far as it is changed."""

    def __init__(self) -> None:
        self.uris: list[str] = []
        self.begun: list[dict[str, object]] = []

    def set_tracking_uri(self, uri: str) -> None:
        self.uris.append(uri)

    def set_registry_uri(self, uri: str) -> None:
        self.uris.append(uri)

    def start_run(
        self, run_id: str | None = None, experiment_id: str | None = None, run_name: str | None = None
    ) -> str:
        self.begun.append({"run_id": run_id, "experiment_id": experiment_id, "run_name": run_name})
        return "run"

    def set_experiment(self, experiment_name: str | None = None, experiment_id: str | None = None) -> str | None:
        return experiment_name


def test_mlflow_of_other_ranks_stays_in_its_own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MLFLOW_RUN_ID", "MLFLOW_ALLOW_FILE_STORE"):
        monkeypatch.setenv(name, "of the job")
    monkeypatch.setenv("KERAS_DDL_RUN_DIR", str(tmp_path))
    mlflow, told = Store(), []
    mlflow_scratch.log_to_scratch(mlflow, lambda: told.append("once"))  # type: ignore[arg-type]
    mlflow.set_tracking_uri("http://server")
    mlflow.set_registry_uri("http://server")
    (uri,) = mlflow.uris
    assert uri.startswith(f"{tmp_path.as_uri()}/keras_ddl-mlflow-"), "where the launcher removes it"
    assert told == []
    assert "MLFLOW_RUN_ID" not in os.environ
    assert mlflow.start_run("a1b2", run_name="tanh") == "run"
    assert told == ["once"]
    assert mlflow.begun == [{"run_id": None, "experiment_id": None, "run_name": "tanh"}], (
        "that run is in rank 0's store"
    )
    assert mlflow.set_experiment("sums") == "sums"
    assert mlflow.set_experiment(experiment_id="7") == "experiment 7"
