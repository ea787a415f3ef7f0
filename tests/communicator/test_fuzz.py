"""Random collectives against NumPy, and many of them against a leak: short runs of the two programs."""

import re
from pathlib import Path

import pytest

from harness.rank_tests import run_ranks

ROOT = Path(__file__).parents[2]
FUZZ, SOAK = ROOT / "tools" / "fuzz.py", ROOT / "benchmarks" / "soak.py"
pytestmark = pytest.mark.parallel


@pytest.mark.parametrize(
    ("np", "mode"),
    [(2, "p"), *(pytest.param(4, each, marks=pytest.mark.long) for each in ("x:2x2", "x:1x4"))],
)
def test_fuzz_equals_numpy(np, mode):
    # A seed of its own each time finds more over the days; a failure prints it.
    outcome = run_ranks(FUZZ, np, args=["--seconds", 2, "--no-tensorflow"], mode=mode).check()
    assert re.search(r"\d+ rounds, \d+ calls, \d ranks: results equal NumPy's", outcome.ranks[0].stdout), outcome.text()


@pytest.mark.long
@pytest.mark.parametrize(("np", "mode"), [(2, "p"), (4, "x:2x2")])
def test_fuzz_of_tensors_equals_numpy(np, mode):
    outcome = run_ranks(FUZZ, np, args=["--seconds", 6], mode=mode).check()
    assert "results equal NumPy's" in outcome.ranks[0].stdout, outcome.text()


def test_fuzz_prints_how_to_repeat_a_failure():
    # An oracle that is wrong stands for a collective that is.
    def work(program):
        import runpy

        import numpy as np

        module = runpy.run_path(program)
        module["OPS"]["sum"] = lambda stacked, axis: np.sum(stacked, axis=axis) + 1
        module["main"](["--seed", "5", "--seconds", "20", "--no-tensorflow"])

    outcome = run_ranks(work, 2, args=(str(FUZZ),))
    assert outcome.returncode != 0
    assert re.search(r"--seed 5 --first-round \d+ --rounds 1 --no-tensorflow", outcome.text()), outcome.text()


@pytest.mark.long
@pytest.mark.parametrize(("mode", "arguments"), [("p", []), ("x:1x2", ["--no-tensorflow"])])
def test_soak_finds_nothing_that_grows(mode, arguments):
    arguments = ["--calls", 5_000, "--warm-up", 2_500, *arguments]
    outcome = run_ranks(SOAK, 2, args=arguments, mode=mode).check()
    assert "5,000 calls after 2,500" in outcome.ranks[0].stdout, outcome.text()
