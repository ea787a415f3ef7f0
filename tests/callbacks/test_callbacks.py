"""A training that is killed and resumed. tests/strategy/test_strategy.py runs the callbacks on ranks."""

import os
from pathlib import Path

import numpy as np
import pytest

from launch.launching import environment, run

HERE = Path(__file__).parent
PROGRAM = HERE / "killed_training.py"


@pytest.mark.long
def test_training_killed_twenty_times_equals_an_undisturbed_one(tmp_path):
    """Uses 2 ranks, which `keras-ddl run` restarts after each kill."""
    kills, epochs = 20, 26
    arguments = ["run", "-np", "2", "--restarts", str(kills), "python", str(PROGRAM)]
    paths = os.pathsep.join([str(HERE.parent), environment("", tmp_path, None)["PYTHONPATH"]])
    arguments += [str(tmp_path), str(kills), str(epochs)]
    ended = run(arguments, tmp_path, env={"PYTHONPATH": paths}, limit_seconds=120 + 60 * kills)
    assert ended.status == 0, ended
    for number in range(kills):
        assert f"restart {number + 1} of {kills}, with 2 ranks (rank " in ended.err, ended
    assert ended.err.count(": killed by SIGKILL)") == kills, ended
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    for epoch in range(epochs):
        assert (killed / f"epoch-{epoch}.json").read_text() == (whole / f"epoch-{epoch}.json").read_text()
    with np.load(killed / "end.npz") as ours, np.load(whole / "end.npz") as expected:
        for name in expected:
            np.testing.assert_array_equal(ours[name], expected[name], err_msg=name)
