"""MLflow stores nothing from ranks other than 0."""

import os
from pathlib import Path

import pytest

from keras_ddl.trackers import mlflow_scratch


class Store:
    """A stand-in for the parts of MLflow that keras_ddl changes."""

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


def test_mlflow_on_other_ranks_uses_its_own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MLFLOW_RUN_ID", "MLFLOW_ALLOW_FILE_STORE"):
        monkeypatch.setenv(name, "of the job")
    monkeypatch.setenv("KERAS_DDL_RUN_DIR", str(tmp_path))
    mlflow, notified = Store(), []
    mlflow_scratch.log_to_scratch(mlflow, lambda: notified.append("once"))  # type: ignore[arg-type]
    mlflow.set_tracking_uri("http://server")
    mlflow.set_registry_uri("http://server")
    (uri,) = mlflow.uris
    assert uri.startswith(f"{tmp_path.as_uri()}/keras_ddl-mlflow-"), "where the launcher removes it"
    assert notified == []
    assert "MLFLOW_RUN_ID" not in os.environ
    assert mlflow.start_run("a1b2", run_name="tanh") == "run"
    assert notified == ["once"]
    assert mlflow.begun == [{"run_id": None, "experiment_id": None, "run_name": "tanh"}], (
        "that run is in rank 0's store"
    )
    assert mlflow.set_experiment("sums") == "sums"
    assert mlflow.set_experiment(experiment_id="7") == "experiment 7"
