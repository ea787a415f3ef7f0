"""fit goes on when ranks are killed, and ends with the weights, history and predictions of one process."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from launch.launching import Ended, run

PROGRAM = str(Path(__file__).with_name("surviving_training.py"))
pytestmark = [pytest.mark.parallel, pytest.mark.quiet]


@cache
def of_one_process(model: str, data: str) -> list:
    ended = subprocess.run([sys.executable, PROGRAM, model, data], capture_output=True, text=True, check=True)
    return json.loads(ended.stdout.splitlines()[-1])[2:]


def of_ranks(tmp_path: Path, ranks: int, *arguments: str) -> tuple[Ended, list[list]]:
    ended = run(["run", "-np", str(ranks), "--min-np", "1", "python", PROGRAM, *arguments], tmp_path)
    assert ended.status == 0, ended
    lines = [re.sub(r"^\[\d\] ", "", line) for line in ended.out.splitlines()]
    return ended, sorted(json.loads(line) for line in lines if line.startswith("["))


def check(tmp_path: Path, model: str, data: str, where: str, *killed: str, ranks: int = 3) -> None:
    ended, left = of_ranks(tmp_path, ranks, model, data, where, *killed)
    lost = {int(each.partition(":")[0]) for each in killed}
    assert [each[0] for each in left] == [rank for rank in range(ranks) if rank not in lost], ended
    assert [each[1] for each in left] == list(range(ranks - len(lost))), ended
    assert ended.err.count(" was lost (killed by SIGKILL); ") == len(lost), ended
    history, weights, predicted = of_one_process(model, data)
    for _, _, seen, values, made in left:
        assert seen.keys() == history.keys()
        for name in history:
            np.testing.assert_allclose(seen[name], history[name], rtol=1e-12, err_msg=f"{name}\n{ended}")
        for one, other in zip(values, weights, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(made, predicted, rtol=1e-10, atol=1e-12)


def test_a_rank_is_killed_in_the_middle_of_a_step(tmp_path: Path) -> None:
    check(tmp_path, "mlp", "arrays", "step", "1:7")


@pytest.mark.long
@pytest.mark.parametrize("model", ["cnn", "lstm", "attention"])
def test_models(model: str, tmp_path: Path) -> None:
    check(tmp_path, model, "arrays", "step", "2:6")


@pytest.mark.long
@pytest.mark.parametrize("data", ["dataset", "open", "sequence", "generator", "several"])
def test_data(data: str, tmp_path: Path) -> None:
    check(tmp_path, "mlp", data, "step", "1:5")


@pytest.mark.long
@pytest.mark.parametrize("moment", ["between 1:0", "between 2:6", "test 1:5", "epoch 1:1", "step 1:0", "step 1:4 2:4"])
def test_moments(moment: str, tmp_path: Path) -> None:
    check(tmp_path, "mlp", "dataset", *moment.split())


@pytest.mark.long
def test_all_but_one_are_killed_one_after_the_other(tmp_path: Path) -> None:
    check(tmp_path, "mlp", "arrays", "step", "3:2", "1:6", "2:11", ranks=4)


@pytest.mark.long
def test_rank_0_is_killed(tmp_path: Path) -> None:
    """It has written for all: the job ends, and --restarts begins it again."""
    ended = run(["run", "-np", "3", "--min-np", "1", "python", PROGRAM, "mlp", "arrays", "step", "0:6"], tmp_path)
    assert ended.status == 137, ended
    assert "rank 0 on host" in ended.err and "failed first, and the job was ended: killed by SIGKILL" in ended.err
