"""Communicators of some of the ranks: over shared memory, over MPI, and over both."""

from pathlib import Path

from parallel.harness import rank_tests

HERE = Path(__file__).parent

test_split = rank_tests(HERE / "split_checks.py", [1, 2, 4, 8, (2, "x:1x2"), (4, "x:2x2"), (4, "x:1x4")])
test_split_of_tensors = rank_tests(HERE / "split_ops_checks.py", [2, (4, "x:2x2")], check_timeout=90)
