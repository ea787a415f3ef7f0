"""The callbacks on real ranks, and trainings that are killed and resumed."""

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from harness.rank_tests import rank_tests, run_ranks
from launch.launching import environment, run

HERE = Path(__file__).parent
PROGRAM = HERE / "killed_training.py"

CHECKS = [HERE / name for name in ("callbacks_checks.py", "resume_checks.py", "progress_checks.py")]

test_callbacks = rank_tests(CHECKS, [2])
test_callbacks_of_three = pytest.mark.long(rank_tests(CHECKS, [3]))


def train_and_kill(folder, kills, ranks, epochs):
    """Runs the training with one kill after the other, and to its end; `ranks`: how many, run by run.

    Returns the two runs, killed and not: (arrays of weights and optimizer, logs of each epoch).
    """
    options = json.dumps({"seed": 11, "epochs": epochs, "exact": False})
    for number in range(kills):
        killed = run_ranks(PROGRAM, ranks[number % len(ranks)], args=(folder, options, number))
        assert killed.returncode in (128 + signal.SIGKILL, -signal.SIGKILL), killed.text()  # of mpirun; of one rank
    run_ranks(PROGRAM, ranks[kills % len(ranks)], args=(folder, options, -1)).check()
    return both_runs(folder, epochs)


def train_and_restart(folder, kills, epochs):
    """The same with 2 ranks, started again by `keras-ddl run` after each kill."""
    options = json.dumps({"seed": 11, "epochs": epochs, "exact": True})
    arguments = ["run", "-np", "2", "--restarts", str(kills), "python", str(PROGRAM), str(folder), options]
    paths = os.pathsep.join([str(HERE.parent), environment("", folder, None)["PYTHONPATH"]])
    ended = run([*arguments, f"of:{kills}"], folder, env={"PYTHONPATH": paths}, limit_seconds=120 + 60 * kills)
    assert ended.status == 0, ended
    for number in range(kills):
        assert f"restart {number + 1} of {kills}, with 2 ranks (rank " in ended.err, ended
    assert ended.err.count(": killed by SIGKILL)") == kills, ended
    return both_runs(folder, epochs)


def both_runs(folder, epochs):
    return [
        (
            list(np.load(folder / name / "end.npz").values()),
            [json.loads((folder / name / f"epoch-{epoch}.json").read_text()) for epoch in range(epochs)],
        )
        for name in ("killed", "whole")
    ]


def assert_bitwise_equal(killed, whole):
    assert killed[1] == whole[1]
    for mine, one in zip(killed[0], whole[0], strict=True):
        np.testing.assert_array_equal(mine, one)


@pytest.mark.quiet
@pytest.mark.parallel
@pytest.mark.slow
def test_training_killed_at_random_moments_ends_as_one_that_was_not(tmp_path):
    assert_bitwise_equal(*train_and_restart(tmp_path, kills=1, epochs=3))


@pytest.mark.long
def test_training_killed_twenty_times_ends_as_one_that_was_not(tmp_path):
    assert_bitwise_equal(*train_and_restart(tmp_path, kills=20, epochs=26))


@pytest.mark.long
def test_killed_training_goes_on_with_another_number_of_ranks(tmp_path):
    killed, whole = train_and_kill(tmp_path, kills=5, ranks=[2, 3, 1], epochs=7)
    for mine, one in zip(killed[0], whole[0], strict=True):
        np.testing.assert_allclose(mine, one, rtol=2e-4, atol=2e-5)
    for mine, one in zip(killed[1], whole[1], strict=True):
        assert mine.keys() == one.keys()
        for name in one:
            np.testing.assert_allclose(mine[name], one[name], rtol=2e-5, err_msg=name)
