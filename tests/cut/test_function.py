"""`Strategy.function` on real ranks; and, in a launch of their own, batches of fewer rows than ranks."""

from pathlib import Path

import pytest

from harness.rank_tests import rank_tests

HERE = Path(__file__).parent
test_function = rank_tests(HERE / "function_checks.py", [2])
# Three: with ranks that have neither the first rows nor the last, and ranks without any.
test_few_rows = pytest.mark.long(rank_tests(HERE.parent / "strategy" / "few_rows_checks.py", [3]))
