"""The box of rings at 4 and 8 ranks: the outer dimensions of a forced mode go over MPI even inside a host."""

from pathlib import Path

from harness.rank_tests import rank_tests

test_box = rank_tests(
    Path(__file__).with_name("hierarchy_checks.py"), [(4, "x:1x4"), (4, "x:2x2"), (4, "x:1x2x2"), (8, "x:2x2x2")]
)
