"""The scoreboard's judge, and one program with two strategies."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

PROGRAM = Path(__file__).resolve().parents[3] / "benchmarks" / "scoreboard.py"
sys.path.insert(0, str(PROGRAM.parent))
from _scoreboard import jobs  # noqa: E402
from _scoreboard.judge import CRASHED, DRAWS, EQUAL, HUNG, NONE, REFUSED, WRONG, Outcome, judge  # noqa: E402
from _scoreboard.peers import Peer  # noqa: E402

sys.path.remove(str(PROGRAM.parent))


def outcome(weight=(2.0, 0.0), log=0.5, **others) -> Outcome:
    values = {"weight 0 kernel": np.array(weight), "weight 1 bias": np.zeros(3), "log loss": np.array([log])}
    return Outcome(values | {label: np.array(value) for label, value in others.items()})


def test_judge_equal_is_relative_to_the_largest_weight():
    assert judge(outcome(), [outcome((2.0, 1e-9)), outcome()]).kind == EQUAL
    verdict = judge(outcome(), [outcome(), outcome((2.0, 1e-8))])  # the worst process counts
    assert (verdict.kind, verdict.gap) == (WRONG, pytest.approx(5e-9))
    assert judge(outcome(), [outcome((2.0, 1e-8))], tolerance=1e-8).kind == EQUAL
    assert judge(outcome((0.0, 0.0)), [outcome((0.0, 1e-12))]).kind == WRONG  # relative to zero


def test_judge_wrong_names_weights_before_logs():
    assert "weight 0 kernel is off by 5.0e-01" in judge(outcome(), [outcome((1.0, 0.0), log=5.0)]).detail
    verdict = judge(outcome(), [outcome(log=0.6)])
    assert verdict.detail == "weights are equal, log loss is off by 2.0e-01"
    assert verdict.cell() == "wrong 2e-01"


@pytest.mark.parametrize("log", [np.nan, np.inf], ids=["nan", "infinity"])
def test_judge_wrong_if_a_number_is_not_finite(log):
    assert judge(outcome(), [outcome(log=log)]).kind == WRONG
    assert judge(outcome(log=log), [outcome()]).kind == WRONG
    assert judge(outcome(log=log), [outcome(log=log)]).kind == EQUAL  # one process has it, too


def test_judge_wrong_if_a_value_is_missing_or_has_another_shape():
    assert judge(outcome(), [Outcome({})]).kind == WRONG
    assert judge(Outcome({}), [Outcome({})]).kind == WRONG  # nothing was compared
    assert judge(outcome(), [outcome((2.0, 0.0, 0.0))]).kind == WRONG
    assert judge(outcome(), [outcome(further=1.0)]).kind == WRONG


def test_judge_without_logs_compares_weights_only():
    assert judge(outcome(), [outcome(log=7.0)], logs=False).kind == EQUAL
    assert judge(outcome(), [outcome((1.0, 0.0))], logs=False).kind == WRONG


def test_judge_random_outputs_may_differ_only_if_the_rest_is_equal():
    drawn = {"drawn weight 0 kernel": 1.0, "drawn log loss": 0.3}
    other = {**drawn, "drawn weight 0 kernel": 1.5}
    assert judge(outcome(**drawn), [outcome(**drawn)]).kind == EQUAL
    assert judge(outcome(**drawn), [outcome(**other)]).kind == DRAWS
    assert judge(outcome(**drawn), [outcome((1.0, 0.0), **other)]).kind == WRONG


def test_judge_refused_by_any_process_shows_its_first_line():
    refused = Outcome(error="ValueError: 3 rows")
    assert judge(outcome(), [outcome(), refused]).kind == REFUSED
    verdict = judge(outcome(), [Outcome(ended=HUNG), refused])
    assert (verdict.kind, verdict.detail) == (REFUSED, "ValueError: 3 rows (another process hangs)")
    assert judge(outcome(), [Outcome(error="NotOffered: no fit")]).kind == NONE


def test_judge_crashed_before_hung():
    assert judge(outcome(), [Outcome(ended=HUNG), outcome()]).kind == HUNG
    assert judge(outcome(), [Outcome(ended=HUNG), Outcome(ended=CRASHED)]).kind == CRASHED


def test_judge_reports_a_warning_that_one_process_lacked():
    expected, seen = outcome(), outcome((1.0, 0.0))
    seen.warned = expected.warned = ["usual"]
    assert "warned" not in judge(expected, [seen]).detail
    seen.warned = ["usual", "replicas differ"]
    assert "(warned: replicas differ)" in judge(expected, [seen]).detail


@pytest.mark.parametrize(("then", "seconds", "kind"), [("sleep 600", 2, HUNG), ("exit 3", 60, CRASHED)])
def test_jobs_continue_after_a_program_that_never_ends(then, seconds, kind):
    class Peculiar(Peer):
        @classmethod
        def command(cls, python: str, arguments: list[str]) -> list[str]:
            folder, programs = arguments[arguments.index("--folder") + 1], arguments[arguments.index("--only") + 1 :]
            return ["sh", "-c", f"touch {folder}/{programs[0]}.0.begun; {then}"]

    seen = []
    programs = ["first", "second"]
    jobs.run(Peculiar, sys.executable, programs, seconds, lambda name, each: seen.append((name, each[0].ended)))
    assert seen == [("first", kind), ("second", kind)]


@pytest.mark.long
def test_scoreboard_compares_a_short_batch_of_both_strategies(tmp_path):
    command = [sys.executable, PROGRAM, "--only", "short_odd", "--json", tmp_path / "board.json"]
    done = subprocess.run(
        [*map(str, command), "--strategy", "keras_ddl", "Mirrored"], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "board.json").read_text())
    verdicts = result["verdicts"]["short_odd"]
    assert verdicts["keras_ddl"]["kind"] == EQUAL, verdicts
    assert verdicts["Mirrored"]["kind"] == WRONG and 1e-3 < verdicts["Mirrored"]["gap"] < 1, verdicts
    assert result["counts"]["keras_ddl"] == {EQUAL: 1}
    assert "| a last batch of 3 rows |" in done.stdout
