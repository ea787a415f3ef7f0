"""The callbacks on real ranks, and trainings that are killed and resumed."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from harness.rank_tests import run_ranks
from launch.launching import environment, run

HERE = Path(__file__).parent
PROGRAM = HERE / "killed_training.py"


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
@pytest.mark.long
def test_training_killed_at_random_moments_ends_as_one_that_was_not(tmp_path):
    assert_bitwise_equal(*train_and_restart(tmp_path, kills=1, epochs=3))


@pytest.mark.long
def test_training_killed_twenty_times_ends_as_one_that_was_not(tmp_path):
    assert_bitwise_equal(*train_and_restart(tmp_path, kills=20, epochs=26))


def test_step_metrics_of_a_process_without_ranks(tmp_path):
    def train(folder):
        import keras
        import numpy as np

        import keras_ddl

        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        metrics = keras_ddl.callbacks.StepMetrics(folder, every=4)
        model.fit(np.ones((64, 3)), np.ones((64, 1)), batch_size=8, verbose=0, callbacks=[metrics])
        from callbacks.step_metrics_checks import written

        return written(folder)

    found = run_ranks(train, 1, args=(os.fspath(tmp_path),)).check().ranks[0].result
    assert [step for step, _ in found["job/step_seconds"]] == [5, 8]
    rates = zip(found["job/rows_per_second"], found["job/step_seconds"])
    assert all(abs(rate * seconds - 8) < 0.1 for (_, rate), (_, seconds) in rates)
    assert len(found) == 2, "nothing is said of communication that there is not"
