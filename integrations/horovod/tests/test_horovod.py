"""keras_ddl.horovod on real ranks: what its collectives and process sets give, against NumPy."""

from pathlib import Path

import pytest

from harness.rank_tests import rank_tests

HERE = Path(__file__).parent
CHECKS = [HERE / "op_checks.py", HERE / "set_checks.py"]

# Every name once is enough: on two ranks.
NAMES = [HERE / "name_checks.py", HERE / "name_collective_checks.py"]

test_horovod_of_two = rank_tests([*CHECKS, *NAMES], [2])
test_horovod_of_one_and_three = pytest.mark.long(rank_tests(CHECKS, [1, 3]))
