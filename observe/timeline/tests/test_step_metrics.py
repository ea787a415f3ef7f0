"""StepMetrics reports the speed of a running training, on one rank and on several."""

from pathlib import Path

import pytest

import keras_ddl
from harness.rank_tests import rank_tests
from keras_ddl.errors import ConfigError

CHECKS = Path(__file__).with_name("step_metrics_checks.py")
test_on_ranks = pytest.mark.long(rank_tests(CHECKS, [1, 3]))


@pytest.mark.parametrize("wrong", [0, True, 2.0, "epoch"])
def test_every_must_be_a_number_of_steps(wrong):
    with pytest.raises(ConfigError, match=f"number of steps, 1 or more. Received: every={wrong!r}"):
        keras_ddl.callbacks.StepMetrics("logs", every=wrong)
