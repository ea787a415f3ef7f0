"""DDL's names on two ranks."""

from pathlib import Path

from harness.rank_tests import rank_tests

test_of_two = rank_tests(Path(__file__).with_name("smoke_checks.py"), [2], env={"DDL_OPTIONS": "-mode p:2x1"})
