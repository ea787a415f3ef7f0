"""The callbacks on real ranks, and trainings that are killed and resumed."""

import json
import signal
from pathlib import Path

import numpy as np
import pytest

from harness.rank_tests import rank_tests, run_ranks
from keras_ddl import checkpoint as ckpt

HERE = Path(__file__).parent
PROGRAM = HERE / "killed_training.py"

CHECKS = [HERE / "callbacks_checks.py", HERE / "resume_checks.py"]

test_callbacks = rank_tests(CHECKS, [2], check_timeout=120)
test_callbacks_of_three = pytest.mark.long(rank_tests(CHECKS, [3], check_timeout=120))


def train_and_kill(folder, kills, ranks, epochs, exact):
    """Runs the training with one kill after the other, and to its end; `ranks`: how many, run by run.

    Returns the two runs, killed and not: (arrays of weights and optimizer, logs of each epoch).
    """
    options = json.dumps({"seed": 11, "epochs": epochs, "exact": exact})
    for number in range(kills):
        killed = run_ranks(PROGRAM, ranks[number % len(ranks)], args=(folder, options, number), timeout=120)
        assert killed.returncode in (128 + signal.SIGKILL, -signal.SIGKILL), killed.text()  # of mpirun; of one rank
        if exact:  # before the first kill there was one whole checkpoint, of step 3
            steps = [each.step for each in ckpt.list_checkpoints(folder / "killed" / "ckpt")]
            assert steps == [3] if number == 0 else steps, steps
    run_ranks(PROGRAM, ranks[kills % len(ranks)], args=(folder, options, -1), timeout=240).check()
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
    assert_bitwise_equal(*train_and_kill(tmp_path, kills=4, ranks=[2], epochs=6, exact=True))


@pytest.mark.long
def test_training_killed_twenty_times_ends_as_one_that_was_not(tmp_path):
    assert_bitwise_equal(*train_and_kill(tmp_path, kills=20, ranks=[2], epochs=26, exact=True))


@pytest.mark.long
def test_killed_training_goes_on_with_another_number_of_ranks(tmp_path):
    killed, whole = train_and_kill(tmp_path, kills=5, ranks=[2, 3, 1], epochs=7, exact=False)
    for mine, one in zip(killed[0], whole[0], strict=True):
        np.testing.assert_allclose(mine, one, rtol=2e-4, atol=2e-5)
    for mine, one in zip(killed[1], whole[1], strict=True):
        assert mine.keys() == one.keys()
        for name in one:
            np.testing.assert_allclose(mine[name], one[name], rtol=2e-5, err_msg=name)
