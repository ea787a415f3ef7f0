"""A spare takes the place of a killed rank, and all end with the weights, history and predictions of one process."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from launch.launching import Ended, run

PROGRAM = str(Path(__file__).with_name("surviving_training.py"))
EPOCHS, PAUSE = 12, 0.1
pytestmark = [pytest.mark.parallel, pytest.mark.quiet]


@cache
def of_one_process(model: str, data: str) -> list:
    environment = os.environ | {"EPOCHS": str(EPOCHS)}
    command = [sys.executable, PROGRAM, model, data]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return json.loads(ended.stdout.splitlines()[-1])[2:]


def check(tmp_path: Path, model: str, data: str, where: str, *killed: str, spares: int = 1) -> Ended:
    """All spares join, which are numbered from 3 on."""
    numbers = ["-np", "3", "--min-np", "1", "--spares", str(spares)]
    variables = ["-x", f"EPOCHS={EPOCHS}", "-x", f"PAUSE={PAUSE}"]
    ended = run(["run", *numbers, *variables, "python", PROGRAM, model, data, where, *killed], tmp_path)
    assert ended.status == 0, ended
    lines = [re.sub(r"^\[\d\] ", "", line) for line in ended.out.splitlines()]
    left = sorted(json.loads(line) for line in lines if line.startswith("["))
    lost = {int(each.partition(":")[0]) for each in killed}
    assert [each[0] for each in left] == [rank for rank in range(3 + spares) if rank not in lost], ended
    assert [each[1] for each in left] == list(range(len(left))), ended
    history, weights, predicted = of_one_process(model, data)
    for _, _, seen, values, made in left:
        assert seen.keys() == history.keys()
        for name in history:
            np.testing.assert_allclose(seen[name], history[name], rtol=1e-12, err_msg=f"{name}\n{ended}")
        for one, other in zip(values, weights, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(made, predicted, rtol=1e-10, atol=1e-12)
    return ended


def test_a_spare_takes_the_place_of_a_killed_rank(tmp_path: Path) -> None:
    ended = check(tmp_path, "mlp", "arrays", "step", "1:7")
    assert "rank 3, a spare, starts, to take the place of rank 1." in ended.err
    assert "rank 1 was lost (killed by SIGKILL); 2 go on." in ended.err and "rank 3 has joined; 3 go on." in ended.err


@pytest.mark.long
@pytest.mark.parametrize("model", ["cnn", "lstm", "attention"])
def test_models(model: str, tmp_path: Path) -> None:
    check(tmp_path, model, "arrays", "step", "2:6")


@pytest.mark.long
@pytest.mark.parametrize("data", ["dataset", "open", "sequence", "generator", "several"])
def test_data(data: str, tmp_path: Path) -> None:
    check(tmp_path, "mlp", data, "step", "1:5")


@pytest.mark.long
def test_the_spare_is_killed_and_another_one_comes(tmp_path: Path) -> None:
    check(tmp_path, "mlp", "arrays", "step", "1:5", "3:44", spares=2)


@pytest.mark.long
def test_spares_that_nobody_needs_end_with_the_job(tmp_path: Path) -> None:
    ended = run(["run", "-np", "2", "--min-np", "1", "--spares", "1", "python", "-c", "print('ran')"], tmp_path)
    assert ended.status == 0 and ended.out.count("ran") == 2 and "spare" not in ended.err, ended
