"""Ranks other than 0 log nothing to Weights & Biases and MLflow.

tests/project/works_with tests the real packages.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import keras_ddl
from keras_ddl.topology import launcher

WANDB = "def init(project=None, mode=None):\n    return mode\n"
BEFORE, AFTER = "import wandb, keras_ddl", "import keras_ddl, wandb"


@pytest.mark.parametrize(
    ("imports", "rank", "setting", "mode"),
    [(BEFORE, 1, "0", "disabled"), (AFTER, 1, "0", "disabled"), (AFTER, 0, "0", "offline"), (AFTER, 1, "1", "offline")],
)
def test_wandb_runs_are_disabled_on_other_ranks(
    tmp_path: Path, imports: str, rank: int, setting: str, mode: str
) -> None:
    (tmp_path / "wandb.py").write_text(WANDB)
    code = f"{imports}; wandb.init(); print(wandb.init('sums', mode='offline'), wandb.init.__name__)"
    ranks = {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": "2", "KERAS_DDL_TRACK_ALL_RANKS": setting}
    env = {**os.environ, **ranks, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.stdout.split() == [mode, "init"], done.stderr
    assert done.stderr.count("KERAS_DDL_TRACK_ALL_RANKS=1") == (mode == "disabled"), "said once"


def test_trackers_are_not_imported_without_a_launcher() -> None:
    environ = {name: value for name, value in os.environ.items() if name not in keras_ddl._RANK_VARIABLES}
    code = "import sys, keras_ddl; print([name for name in ('keras_ddl.trackers', 'socket') if name in sys.modules])"
    for ranks, imported in (({}, []), ({"PMI_RANK": "1", "PMI_SIZE": "2"}, ["keras_ddl.trackers", "socket"])):
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env={**environ, **ranks}, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == str(imported)


def test_rank_variables_cover_all_launchers() -> None:
    table = {rank for _, rank, _ in launcher._LAUNCHERS}
    assert set(keras_ddl._RANK_VARIABLES) == {*table, "KERAS_DDL_HOST_RANK"}
