"""What a script starts of Weights & Biases and MLflow on ranks other than 0. tests/works_with has the real packages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from keras_ddl.trackers import mlflow_scratch

WANDB = "def init(project=None, mode=None):\n    return mode\n"
BEFORE, AFTER = "import wandb, keras_ddl", "import keras_ddl, wandb"


@pytest.mark.parametrize(
    ("imports", "rank", "setting", "mode"),
    [(BEFORE, 1, "0", "disabled"), (AFTER, 1, "0", "disabled"), (AFTER, 0, "0", "offline"), (AFTER, 1, "1", "offline")],
)
def test_wandbs_runs_are_disabled_on_other_ranks(
    tmp_path: Path, imports: str, rank: int, setting: str, mode: str
) -> None:
    (tmp_path / "wandb.py").write_text(WANDB)
    code = f"{imports}; print(wandb.init('sums', mode='offline'), wandb.init.__name__)"
    ranks = {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": "2", "KERAS_DDL_TRACK_ALL_RANKS": setting}
    env = {**os.environ, **ranks, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.stdout.split() == [mode, "init"], done.stderr


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


def test_mlflow_of_other_ranks_stays_in_its_own_store(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MLFLOW_RUN_ID", "MLFLOW_ALLOW_FILE_STORE"):
        monkeypatch.setenv(name, "of the job")
    mlflow = Store()
    mlflow_scratch.log_to_scratch(mlflow)  # type: ignore[arg-type]
    mlflow.set_tracking_uri("http://server")
    mlflow.set_registry_uri("http://server")
    (uri,) = mlflow.uris
    assert uri.startswith("file:///") and "keras_ddl-mlflow-" in uri
    assert "MLFLOW_RUN_ID" not in os.environ
    assert mlflow.start_run("a1b2", run_name="tanh") == "run"
    assert mlflow.begun == [{"run_id": None, "experiment_id": None, "run_name": "tanh"}], (
        "that run is in rank 0's store"
    )
    assert mlflow.set_experiment("sums") == "sums"
    assert mlflow.set_experiment(experiment_id="7") == "experiment 7"
