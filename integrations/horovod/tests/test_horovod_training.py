"""Training with Horovod's interface on several ranks: optimizers, tapes, callbacks and layers without a Strategy."""

from pathlib import Path

import pytest

from harness.rank_tests import rank_tests

HERE = Path(__file__).parent
# The last check of train_checks.py creates a Strategy, so it must come last.
NAMES = ["elastic", "graph_optimizer", "train_callback", "script", "train"]
CHECKS = [HERE / f"{name}_checks.py" for name in NAMES]

# Running these once, on two ranks, is enough.
EVERY_NAME = [HERE / "train_name_checks.py", HERE / "elastic_name_checks.py"]

test_training = rank_tests([*EVERY_NAME, *CHECKS], [2])
test_training_of_three = pytest.mark.long(rank_tests(CHECKS, [3]))
