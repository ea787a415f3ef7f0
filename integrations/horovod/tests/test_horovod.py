"""Compares keras_ddl.horovod's collectives and process sets on several ranks with NumPy."""

from pathlib import Path

import pytest

from harness.rank_tests import rank_tests

HERE = Path(__file__).parent
CHECKS = [HERE / "op_checks.py", HERE / "set_checks.py"]

# Checking every name once, on two ranks, is enough.
NAMES = [HERE / "name_checks.py", HERE / "name_collective_checks.py"]

test_horovod_of_two = rank_tests([*CHECKS, *NAMES], [2])
test_horovod_of_one_and_three = pytest.mark.long(rank_tests(CHECKS, [1, 3]))
