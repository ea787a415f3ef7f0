"""The harness detects failures; otherwise green parallel tests would mean nothing."""

import os
import tempfile
import threading
import time
from pathlib import Path

import pytest

from harness import rank_tests as harness
from harness.rank_tests import run_ranks
from harness.side_by_side import ORDINARY_AT_ONCE, turn, unit_of, units_in

pytestmark = [pytest.mark.parallel, pytest.mark.quiet]
CHECKS = Path(__file__).with_name("harness_checks.py")


def test_checks_of_one_launch_go_to_one_worker():
    def launch_of(check, np):
        return unit_of(f"tests/ops/test_ops_on_ranks.py::test_ops[{check}-{np}]")

    assert launch_of("check_a", "np4-x:2x2") == launch_of("check_b", "np4-x:2x2") != launch_of("check_a", "np4")
    assert unit_of("tests/unit/test_a.py::test_b[1]") == unit_of("tests/unit/test_a.py::test_c")
    assert unit_of("tests/unit/test_a.py::test_b") != unit_of("tests/unit/test_c.py::test_b")
    assert unit_of("tests/launch/test_a.py::test_b[1]") != unit_of("tests/launch/test_a.py::test_b[2]")
    assert unit_of("tests/project/packaging/test_a.py::test_b") == unit_of("tests/project/packaging/test_c.py::test_d")


@pytest.fixture
def other_tests(tmp_path, monkeypatch):
    """Starts tests of a kind that run until `may_end`; returns a semaphore that each of them releases as it begins."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    threads = []

    def start(kind, number=1, may_end=None):
        entered = threading.Semaphore(0)

        def other_test():
            with turn(kind):
                entered.release()
                if may_end is not None:
                    may_end.wait(60)

        for _ in range(number):
            threads.append(threading.Thread(target=other_test))
            threads[-1].start()
        return entered

    yield start
    for thread in threads:
        thread.join(60)


@pytest.mark.parametrize(
    ("running", "comes", "enters"),
    [("any", "any", True), ("quiet", "quiet", True), ("alone", "alone", False)]
    + [(one, other, False) for one in ("any", "quiet", "alone") for other in ("any", "quiet", "alone") if one != other],
)
def test_tests_run_beside_tests_of_their_kind(running, comes, enters, other_tests):
    with turn(running):
        entered = other_tests(comes)
        assert entered.acquire(timeout=60 if enters else 0.2) == enters
    assert enters or entered.acquire(timeout=60)


def test_only_some_ordinary_tests_run_at_once(other_tests):
    may_end = threading.Event()
    entered = other_tests("any", ORDINARY_AT_ONCE + 1, may_end)
    for _ in range(ORDINARY_AT_ONCE):
        assert entered.acquire(timeout=60)
    assert not entered.acquire(timeout=0.2)
    may_end.set()
    assert entered.acquire(timeout=60)


def test_separated_tests_of_a_file_are_two_units():
    one, other, quiet = "tests/a/test_a.py::test_1", "tests/b/test_b.py::test_1", "tests/a/test_a.py::test_2"
    assert len(set(units_in([one, other, quiet]).values())) == 3
    assert len(set(units_in([one, quiet, other]).values())) == 2


def test_turn_is_kept_for_the_next_test_of_its_kind(other_tests):
    with turn("any", following="any"):
        entered = other_tests("quiet")
    assert not entered.acquire(timeout=0.2)
    with turn("any", following="alone"):
        assert not entered.acquire(blocking=False)
    assert entered.acquire(timeout=60)


def test_long_checks_are_marked_long():
    marked = {each.values[0]: [mark.name for mark in each.marks] for each in harness._check_parameters([CHECKS])}
    assert marked.pop("check_runs_after_a_failure") == ["long"]
    assert set(map(tuple, marked.values())) == {()}


def test_harness_reports_each_check_of_one_launch():
    names = harness._check_names([CHECKS])
    results = harness._run_checks([CHECKS], names, 2, None, 3, None, {}, None)
    kinds = {name: outcome for name, (outcome, _) in results.items()}
    assert kinds == {
        "check_passes": "passed",
        "check_fails_on_the_last_rank": "failed",
        "check_skips": "skipped",
        "check_runs_after_a_failure": "passed",
        "check_hangs_on_rank_0": "failed",
    }
    assert "as planned" in results["check_fails_on_the_last_rank"][1]
    assert "in check_hangs_on_rank_0" in results["check_hangs_on_rank_0"][1]  # the stack of the hanging rank


def test_run_ranks_returns_what_each_rank_returned_and_wrote():
    def work(word):
        rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
        print(word, rank)
        return rank * 10

    outcome = run_ranks(work, 2, args=("hello",)).check()
    assert [rank.result for rank in outcome.ranks] == [0, 10]
    assert [rank.stdout for rank in outcome.ranks] == ["hello 0\n", "hello 1\n"]


def test_run_ranks_kills_everything_at_the_timeout():
    def work():
        time.sleep(1000)

    start = time.monotonic()
    outcome = run_ranks(work, 2, timeout=3)
    assert outcome.returncode is None
    assert time.monotonic() - start < 300


def test_rank_imports_keras_quickly_and_hidden_packages_afterwards():
    def work():
        import gc
        import importlib.util
        import sys

        import keras  # noqa: F401

        unseen = [name for name in ("sklearn", "matplotlib") if name not in sys.modules]
        return unseen, gc.isenabled(), gc.get_freeze_count(), [bool(importlib.util.find_spec(each)) for each in unseen]

    (rank,) = run_ranks(work, 1).check().ranks
    unseen, is_enabled, frozen, can_be_found = rank.result
    assert unseen == ["sklearn", "matplotlib"] and is_enabled and frozen > 100_000, rank.result
    assert all(can_be_found)
