"""The certificate of recorded runs; its fields are the ones that docs/verify.md lists."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.source_modules import ROOT
from keras_ddl.launch.job import JobResult
from keras_ddl.launch.outcome import RankOutcome
from keras_ddl.verify import certificate, verification
from keras_ddl.verify.recording import Event, Plan, Recording, Writer
from keras_ddl.verify.runs import Program, Run
from keras_ddl.verify.verification import Verification

PAGE = (ROOT / "observe" / "verify" / "docs" / "verify.md").read_text(encoding="utf-8")
TIMEOUT = "ended after --timeout"
TRACE = {
    "replicated": {"Svd": 2}, "replicated_share": 0.03, "random": {"in kernels": 1}, "collectives": 3, "bytes": 400,
}  # fmt: skip
FACTS = {
    "dtypes": ["float64"],
    "compute_dtypes": ["float64"],
    "floatx": "float64",
    "epsilon": 2.0**-52,
    "compute_epsilon": 2.0**-52,
    "seed": 1708,
    "seeded_by": "verify",
    "strategy": [{"options": {"compression": "'bfloat16'", "min_ranks": "1"}, "chosen": ["compression"]}],
    "environment": {},
    "traces": {"Sequential.train_step": TRACE},
    "versions": {"keras_ddl": "0.1.0"},
}


class Runs:
    """Replaces `runs.run`: returns made-up recordings by (ranks, weights perturbed)."""

    def __init__(self, failures: dict[str, str] | None = None, **weights: Any) -> None:
        self.made: list[tuple[int, Plan]] = []
        self._weights, self._failures = weights, failures or {}

    def __call__(self, program: Program, ranks: int, plan: Plan, folder: Path) -> Run:
        kind = "ranks" if ranks > 1 else "last_bit" if plan.last_bit else "one"
        if kind == "one" and any(number == 1 and not each.last_bit for number, each in self.made):
            kind = "again"
        self.made.append((ranks, plan))
        values = self._weights.get(kind, self._weights["one"])
        result = JobResult([RankOutcome(rank, status=0) for rank in range(ranks)])
        if (error := self._failures.get(kind)) is not None:
            result = JobResult([RankOutcome(0, status=1, traceback=error)], timed_out=error == TIMEOUT)
        for rank in range(ranks):
            writer = Writer(folder, rank)
            for step, value in enumerate(values, 1):
                writer.add(Event(0, "step", "model", step, {"dense/kernel": "weights"}), {"dense/kernel": value})
            if values:
                writer.facts(FACTS)
        is_started = bool(self._weights["one"])
        return Run(result, Recording(folder), 1.0, folder, imported_strategy=is_started, linked=("data", "far"))


def verified(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, **weights: Any) -> tuple[dict[str, Any], str, Runs]:
    """Returns the certificate as JSON and as text, and the runs."""
    runs = Runs(**weights)
    monkeypatch.setattr(verification.runs, "run", runs)
    program = Program(["train.py"], {}, 10.0, 5)
    found = verification.Verifier(program, 2, 3, 1708, tmp_path, lambda _: None).verify(("", "float64"))
    made = json.loads(json.dumps(certificate.as_json(found, ["keras-ddl", "verify", "train.py"])))
    return made, certificate.as_text(made), runs


def steps(*changes: float) -> list[np.ndarray]:
    return [np.linspace(1.0, 2.0, 5) + change for change in changes]


STEPS = steps(0, 0.1, 0.2)


def test_certificate_of_equal_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    one, bits = steps(0, 0.1, 0.2), steps(0, 0.1 + 1e-15, 0.2)
    made, text, runs = verified(monkeypatch, tmp_path, one=one, ranks=steps(0, 0.1, 0.2 + 1e-15), last_bit=bits)
    assert (made["verdict"], made["exit_status"]) == ("equal", 0)
    assert text.startswith("EQUAL: 2 ranks compute what one process computes")
    assert len(runs.made) == 3  # the program's own precision is float64, and no run is repeated
    words = ("yes, bitwise", "Svd (2), 3 % of its arithmetic", "compression='bfloat16'", "1 in kernels", "by verify")
    for each in (*words, "links to directories outside were not copied, so files written there stay: data, far"):
        assert each in text, text


def test_certificate_names_the_first_difference(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made, text, runs = verified(monkeypatch, tmp_path, one=steps(0, 0, 0), ranks=steps(0, 1e-3, 1e-3))
    assert (made["verdict"], made["exit_status"]) == ("different", 1)
    first = made["precisions"][0]["first_difference"]
    assert (first["step"], list(first["names"])) == (2, ["dense/kernel"])
    assert "at step 2 (training step of model) dense/kernel differs by 5.0e-04" in text
    assert len(runs.made) == 4  # one process runs again before the ranks are blamed
    assert re.search(r"one process twice is equal +yes", text)


def test_nondeterministic_program_is_unknown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    one, others = steps(0, 0, 0), steps(0.3, 0.3, 0.3)
    made, text, _ = verified(monkeypatch, tmp_path, one=one, ranks=others, again=steps(0.5, 0, 0))
    assert (made["verdict"], made["exit_status"]) == ("unknown", 2)
    assert "the program is not deterministic: two runs in one process, with the same seed, differ after step 1" in text


@pytest.mark.parametrize(
    ("failures", "weights", "verdict", "why"),
    [
        ({"ranks": TIMEOUT}, {"ranks": STEPS[:2]}, "unknown", "with 2 training steps of the 3 that one process did"),
        ({"ranks": TIMEOUT}, {"ranks": [each + 1 for each in STEPS]}, "different", "they were ended after --timeout"),
        ({"ranks": "ValueError: boom"}, {}, "different", "error that one process does not have: ValueError: boom"),
        ({"one": "ValueError: boom"}, {}, "unknown", "one process failed after 3 training steps: ValueError: boom"),
        ({"one": TIMEOUT}, {}, "unknown", "raise --timeout, or lower --steps"),
        ({"last_bit": "ValueError: boom"}, {}, "unknown", "weights perturbed by one ulp failed: ValueError: boom"),
        ({"last_bit": "ValueError: boom"}, {"ranks": [each + 1 for each in STEPS]}, "different", "kernel differs by"),
        ({"again": "ValueError: boom"}, {"ranks": [each + 1 for each in STEPS]}, "different", "kernel differs by"),
        ({}, {"last_bit": STEPS[:2]}, "unknown", "rounding changes how long the program trains"),
        ({}, {"ranks": STEPS[:2]}, "different", "one process recorded 3 steps, epochs and predictions, rank 0 2"),
        ({}, {"ranks": []}, "different", "one process recorded 3 steps, epochs and predictions, rank 0 0"),
    ],
)
def test_equal_needs_runs_that_end_well_after_equal_steps(
    monkeypatch: Any, tmp_path: Path, failures: dict[str, str], weights: dict[str, Any], verdict: str, why: str
) -> None:
    made, text, _ = verified(monkeypatch, tmp_path, failures=failures, one=STEPS, **weights)
    assert (made["verdict"], made["exit_status"]) == (verdict, 1 if verdict == "different" else 2)
    assert why in made["precisions"][0]["why"] and why in text
    reported = made["precisions"][0]["failures"]
    fields = {"one": "one_process", "ranks": "ranks", "last_bit": "weights_perturbed", "again": "one_process_again"}
    assert list(reported) == [fields[run] for run in failures]
    assert ("ended with an error" in text) == bool(failures)


def test_secrets_of_the_command_are_hidden() -> None:
    made = certificate.as_json(Verification(2, 3, 1708), ["keras-ddl", "-x", "API_KEY=abc", "t.py", "--token=abc"])
    assert made["command"] == "keras-ddl -x 'API_KEY=***' t.py '--token=***'"
    assert "abc" not in certificate.as_text(made)


def test_a_program_without_a_strategy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made, text, runs = verified(monkeypatch, tmp_path, one=[])
    assert (made["verdict"], made["exit_status"], len(runs.made)) == ("unknown", 2, 1)
    assert "the program makes no keras_ddl.Strategy" in text


def test_certificate_fields_match_the_page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made, _, _ = verified(monkeypatch, tmp_path, one=steps(0, 0), ranks=steps(0, 1.0))
    fields = {f"`{name}`" for name in made} | {f"`precisions[].{name}`" for name in made["precisions"][0]}
    table = PAGE.partition("## Fields of the JSON")[2].partition("\n## ")[0]
    listed = {name for row in re.findall(r"^\| (.*?) \|", table, re.MULTILINE) for name in re.findall(r"`[^`]*`", row)}
    assert listed == fields
