"""Programs of other packages at two ranks: the results of one process, and each file written once, by rank 0.

Each program in programs/ is one that users of the package write. It runs as it stands, in float64, as one process and
by `keras-ddl run -np 2`. The rows of docs/works-with.md are these.
"""

from __future__ import annotations

import json
import os
import pickle
import sqlite3
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from works_with import environments

from keras_ddl.compat.tensorflow import tf

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[2] / "examples"
TOLERANCE = 1e-12  # relative; of sums of float64 in another order
pytestmark = [pytest.mark.long, pytest.mark.parallel]


@dataclass(frozen=True)
class Run:
    """What a run of a program left: the folder it ran in, its output, what observe.py has kept of each rank."""

    folder: Path
    output: str
    ranks: list[dict[str, Any]]


@pytest.fixture(scope="module")
def python() -> Path:
    """The Python of an environment with the packages of others."""
    return environments.layered()


def run(python: Path, folder: Path, np: int, program: str, *words: str, status: int = 0) -> Run:
    """Runs a program on `np` ranks, 1 for without a launcher; fails the test unless it ends with `status`."""
    folder.mkdir(exist_ok=True)
    file = EXAMPLES / program if program.endswith(".py") else HERE / "programs" / f"{program}.py"
    observed = [python, HERE / "observe.py", folder, file, *words]
    launcher = [python, "-m", "keras_ddl.cli", "run", "-np", np] if np > 1 else []
    done = subprocess.run(
        [str(word) for word in (*launcher, *observed)],
        cwd=folder,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "", "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "2"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == status, done.stdout[-6000:]
    ranks = [pickle.loads(path.read_bytes()) for path in sorted(folder.glob("*.pickle"))]
    assert len(ranks) == np or status
    return Run(folder, done.stdout, ranks)


def check_equal_to_one_process(python: Path, folder: Path, program: str, *words: str) -> Run:
    """Returns the run at two ranks, compared with that of one process."""
    alone = run(python, folder / "one", 1, program, *words)
    ours = run(python, folder / "two", 2, program, *words)
    first, last = ours.ranks
    assert pickle.dumps(first["history"]) == pickle.dumps(last["history"]), "bitwise equal on all ranks"
    (expected,) = alone.ranks
    assert expected["weights"] is not None
    for one, mine, others in zip(expected["weights"], first["weights"], last["weights"], strict=True):
        assert one[0] == mine[0]
        np.testing.assert_array_equal(mine[1], others[1], err_msg=mine[0])
        check_close(mine[1], one[1], mine[0])
    for name in ("outputs", "written"):
        if expected[name] is None or isinstance(expected[name], str):
            assert first[name] == last[name] == expected[name]
        else:
            check_close(first[name], expected[name], name)
    for name, values in (expected["history"] or {}).items():
        check_close(first["history"][name], values, name)
    return ours


def check_close(mine: Any, one: Any, name: str) -> None:
    scale = max(1.0, float(np.max(np.abs(one))))
    np.testing.assert_allclose(mine, one, rtol=0, atol=TOLERANCE * scale, err_msg=name)


@pytest.mark.parametrize("program", ["hub_bert", "hub_gpt2", "hub_detection", "rs_ranking", "rs_tables", "grain_input"])
def test_training_equals_one_process(python: Path, tmp_path: Path, program: str) -> None:
    check_equal_to_one_process(python, tmp_path, program)


@pytest.mark.parametrize(("program", "result"), [("dlrm", "held-out AUC 0."), ("two_tower", "are of the user's kind")])
def test_recommenders_with_tables_in_shards_equal_one_process(
    python: Path, tmp_path: Path, program: str, result: str
) -> None:
    words = ("--rows", "1500", "--epochs", "2")
    ours = check_equal_to_one_process(python, tmp_path, f"recommender/{program}.py", *words)
    assert "rows of tables of" in ours.output and result in ours.output, ours.output


# ---- KerasTuner


def trials(folder: Path) -> dict[str, dict[str, Any]]:
    found = {path.parent.name: json.loads(path.read_text()) for path in folder.glob("tuning/*/trial_*/trial.json")}
    return dict(sorted(found.items()))


def check_same_trials(ours: dict[str, dict[str, Any]], expected: dict[str, dict[str, Any]]) -> None:
    assert ours.keys() == expected.keys() and len(expected) >= 5
    for name, one in expected.items():
        assert ours[name]["status"] == "COMPLETED"
        assert ours[name]["best_step"] == one["best_step"]
        check_close(ours[name]["score"], one["score"], name)
        values = ours[name]["hyperparameters"]["values"]
        for key, value in one["hyperparameters"]["values"].items():
            # A Gaussian process fits scores that differ in the last bits.
            assert values[key] == pytest.approx(value, rel=1e-6) if isinstance(value, float) else values[key] == value


@pytest.mark.parametrize("tuner", ["RandomSearch", "BayesianOptimization", "Hyperband"])
def test_keras_tuner_tries_the_trials_of_one_process(python: Path, tmp_path: Path, tuner: str) -> None:
    ours = check_equal_to_one_process(python, tmp_path, "tune", tuner)
    check_same_trials(trials(tmp_path / "two"), trials(tmp_path / "one"))
    for line in ("Search space summary", "Results summary", "Search: Running Trial #1", "Trial 5 Complete"):
        assert ours.output.count(line) == 1, ours.output
    written = {path.relative_to(tmp_path / "two") for path in (tmp_path / "two" / "tuning").rglob("*")}
    assert written == {path.relative_to(tmp_path / "one") for path in (tmp_path / "one" / "tuning").rglob("*")}


def test_keras_tuner_resumes_a_search_that_was_killed(python: Path, tmp_path: Path) -> None:
    run(python, tmp_path / "one", 1, "tune_killed", "Hyperband", status=-9)
    alone = run(python, tmp_path / "one", 1, "tune", "Hyperband")
    killed = run(python, tmp_path / "two", 2, "tune_killed", "Hyperband", status=137)
    assert "Search: Running Trial #4" in killed.output and "Trial 4 Complete" not in killed.output
    resumed = run(python, tmp_path / "two", 2, "tune", "Hyperband")
    assert resumed.output.count("Reloading Tuner from") == 1
    assert "Search: Running Trial #3" not in resumed.output
    check_same_trials(trials(tmp_path / "two"), trials(tmp_path / "one"))
    for mine, one in zip(resumed.ranks[1]["weights"], alone.ranks[0]["weights"], strict=True):
        check_close(mine[1], one[1], one[0])


# ---- what logs


def test_mlflows_callback_logs_one_run(python: Path, tmp_path: Path) -> None:
    ours = check_equal_to_one_process(python, tmp_path, "mlflow_callback")
    assert ours.output.count("logged 50.0 rows") == 2, "what the program reads back is there on every rank"
    check_one_mlflow_run(ours, {"loss", "mae", "val_loss", "val_mae", "validation_loss", "validation_mae", "rows"})


def test_mlflows_autologging_logs_one_run(python: Path, tmp_path: Path) -> None:
    ours = check_equal_to_one_process(python, tmp_path, "mlflow_autolog")
    check_one_mlflow_run(ours, {"loss", "mae"})
    assert "Failed to infer model signature" not in ours.output, "all ranks predict together"


def check_one_mlflow_run(ours: Run, metrics: set[str]) -> None:
    with sqlite3.connect(ours.folder / "mlflow.db") as store:
        runs = store.execute("select status from runs").fetchall()
        logged = {key for (key,) in store.execute("select distinct key from latest_metrics")}
    assert runs == [("FINISHED",)]
    assert logged == metrics
    assert len(list(ours.folder.glob("mlruns/*/models/m-*"))) == 1
    assert len(list(ours.folder.glob("mlruns/*/*/artifacts/model_summary.txt"))) == 1


def test_wandb_logs_one_run_offline(python: Path, tmp_path: Path) -> None:
    ours = check_equal_to_one_process(python, tmp_path, "wandb_offline")
    assert len(list(ours.folder.glob("wandb/offline-run-*"))) == 1
    assert (ours.folder / "best.keras").is_file()


def test_tensorboard_profiles_rank_0(python: Path, tmp_path: Path) -> None:
    ours = check_equal_to_one_process(python, tmp_path, "tensorboard_profile")
    for kind in ("train", "validation"):
        assert len(list(ours.folder.glob(f"logs/{kind}/events.out.*"))) == 1, kind
    assert len(list(ours.folder.glob("logs/**/*.xplane.pb"))) == 1


# ---- a tf.data service


def test_a_tf_data_service_is_read_by_all_ranks(python: Path, tmp_path: Path) -> None:
    service = tf.data.experimental.service
    dispatcher = service.DispatchServer()
    address = dispatcher.target.split("://")[1]
    worker = service.WorkerServer(service.WorkerConfig(dispatcher_address=address))
    check_equal_to_one_process(python, tmp_path, "tf_data_service", address)
    # With a name ranks share one job, and each gets other batches of it.
    shared = run(python, tmp_path / "shared", 2, "tf_data_service", address, "shared", status=1)
    assert "RankMismatchError" in shared.output, shared.output
    del worker
