"""`Strategy.function` on real ranks."""

from pathlib import Path

from harness.rank_tests import rank_tests

test_function = rank_tests(Path(__file__).with_name("function_checks.py"), [3])
