"""`Strategy.function` on three real ranks; and, in the same launch, batches of fewer rows than ranks."""

from pathlib import Path

from harness.rank_tests import rank_tests

HERE = Path(__file__).parent
CHECKS = [
    HERE / "function_checks.py",
    HERE / "function_composite_checks.py",
    HERE.parent / "strategy" / "few_rows_checks.py",
]
# Three: with ranks that have neither the first rows nor the last, and ranks without any.
test_function = rank_tests(CHECKS, [3])
