"""The callbacks on real ranks, and trainings that are killed and resumed."""

from pathlib import Path

import pytest

from harness.rank_tests import rank_tests, run_ranks

HERE = Path(__file__).parent

test_callbacks = rank_tests(HERE / "callbacks_checks.py", [2], check_timeout=120)
test_callbacks_of_three = pytest.mark.long(rank_tests(HERE / "callbacks_checks.py", [3], check_timeout=120))


@pytest.mark.quiet
@pytest.mark.parallel
@pytest.mark.slow
def test_training_that_was_killed_is_resumed_to_the_same_weights(tmp_path):
    program = HERE / "killed_training.py"
    for what in ("sgd-in-epoch", "adam-in-writing"):
        killed = run_ranks(program, 2, args=(tmp_path, what), timeout=120)
        assert killed.returncode not in (0, None), killed.text()
    resumed = run_ranks(program, 2, args=(tmp_path, "resume"), timeout=180).check()
    assert all("compared" in rank.stdout for rank in resumed.ranks), resumed.text()
