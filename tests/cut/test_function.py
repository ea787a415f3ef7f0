"""`Strategy.function` on real ranks, and, in a separate launch, batches with fewer rows than ranks."""

from pathlib import Path

import pytest

from harness.rank_tests import rank_tests

HERE = Path(__file__).parent
test_function = rank_tests(HERE / "function_checks.py", [2])
# With three ranks, some have neither the first nor the last rows, and some have none.
test_few_rows = pytest.mark.long(rank_tests(HERE.parent / "strategy" / "few_rows_checks.py", [3]))
