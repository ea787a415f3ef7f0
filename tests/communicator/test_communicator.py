"""The communicator at 1 to 4 ranks, through shared memory, through MPI, and through both."""

from pathlib import Path

from harness.rank_tests import rank_tests

test_communicator = rank_tests(
    Path(__file__).with_name("communicator_checks.py"), [1, 2, (2, "x:1x2"), (3, "x:1x3"), 4, (4, "x:2x2")]
)
