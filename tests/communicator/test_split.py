"""Communicators of some of the ranks: over shared memory, over MPI, and over both; for their ops see test_ops.py."""

from pathlib import Path

from harness.rank_tests import rank_tests

HERE = Path(__file__).parent

test_split = rank_tests(HERE / "split_checks.py", [1, 2, 4, 8, (2, "x:1x2"), (4, "x:2x2"), (4, "x:1x4")])
