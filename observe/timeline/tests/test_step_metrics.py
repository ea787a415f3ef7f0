"""What a training says of its speed while it runs: StepMetrics."""

import os
from pathlib import Path

import pytest

from harness.rank_tests import rank_tests, run_ranks

CHECKS = Path(__file__).with_name("step_metrics_checks.py")

test_step_metrics = rank_tests(CHECKS, [2])
test_step_metrics_of_three = pytest.mark.long(rank_tests(CHECKS, [3]))


def test_step_metrics_of_a_process_without_ranks(tmp_path):
    def train(folder):
        import keras
        import numpy as np

        import keras_ddl

        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        metrics = keras_ddl.callbacks.StepMetrics(folder, every=4)
        model.fit(np.ones((64, 3)), np.ones((64, 1)), batch_size=8, verbose=0, callbacks=[metrics])
        from step_metrics_checks import written

        return written(folder)

    found = run_ranks(train, 1, args=(os.fspath(tmp_path),)).check().ranks[0].result
    assert [step for step, _ in found["job/step_seconds"]] == [5, 8]
    rates = zip(found["job/rows_per_second"], found["job/step_seconds"])
    assert all(abs(rate * seconds - 8) < 0.1 for (_, rate), (_, seconds) in rates)
    assert len(found) == 2, "nothing is said of communication that there is not"
