"""`Strategy.function` on real ranks."""

from pathlib import Path

from harness.rank_tests import rank_tests

PATIENT = {"KERAS_DDL_DEADLINE_SECONDS": "100"}
CHECKS = [Path(__file__).with_name(f"{name}_checks.py") for name in ("function", "function_composite")]
test_function = rank_tests(CHECKS, [3], check_timeout=120, env=PATIENT)
