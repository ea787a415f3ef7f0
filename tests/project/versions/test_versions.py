"""tools/versions.py: outcomes, the table on the page, and the comparison of values."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from harness.source_modules import load_program

ROOT = Path(__file__).resolve().parents[3]


versions = load_program(ROOT / "tools" / "versions.py")
checks = load_program(ROOT / "tests" / "project" / "versions" / "checks.py")
Row, BEGIN, END = versions.Row, versions.BEGIN, versions.END
EMPTY = f"# Page\n\n{BEGIN}\n{END}\n\n## Next | part\n"
FIRST, SECOND, LAST = versions.PAIRS[0], versions.PAIRS[1], versions.PAIRS[-1]
WORKS, FAILS = Row("works", "1.2, 3.4", "2026-01-02"), Row("fails: fit, LSTM", "1.3, 3.4", "2026-02-03")


def test_table_is_read_as_written():
    page = versions.with_rows(EMPTY, {LAST: FAILS, FIRST: WORKS})
    assert list(versions.rows_in(page).items()) == [(FIRST, WORKS), (LAST, FAILS)]  # in the order of PAIRS
    assert versions.with_rows(page, {}) == page
    assert page.startswith(EMPTY.partition(BEGIN)[0]) and page.endswith(EMPTY.partition(END)[2])


def test_table_keeps_rows_of_pairs_that_were_not_tried():
    page = versions.with_rows(EMPTY, {FIRST: WORKS, SECOND: WORKS, ("0.1", "0.2"): WORKS})
    page = versions.with_rows(page, {SECOND: FAILS})
    assert versions.rows_in(page) == {FIRST: WORKS, SECOND: FAILS}  # 0.1 is no longer a pair


@pytest.mark.parametrize(
    "page", ["no table", BEGIN, f"{END} {BEGIN}", EMPTY + EMPTY, EMPTY.replace(END, f"| 3.15 | 2.21 | works |\n{END}")]
)
def test_page_without_a_complete_table_is_refused(page):
    with pytest.raises(ValueError, match="must"):
        versions.with_rows(page, {FIRST: WORKS})


def test_install_page_has_every_pair():
    assert list(versions.rows_in(versions.PAGE.read_text(encoding="utf-8"))) == versions.PAIRS


def test_every_pair_is_in_the_table_of_versions():
    assert [versions.pair_named("+".join(pair)) for pair in versions.PAIRS] == versions.PAIRS
    for name in ("3.15", "3.15+1.0", "2.21+3.15", ""):
        with pytest.raises(SystemExit, match="KERAS\\+TENSORFLOW"):
            versions.pair_named(name)


@pytest.mark.parametrize(
    ("wrong", "result"),
    [
        ({"import": "", "fit": ""}, "works"),
        ({"import": "", "fit": "off", "LSTM": "off"}, "fails: fit, LSTM"),
        ({"import": "gone", "fit": "gone"}, "fails: everything"),
        ({"installation": "no such version"}, "fails: installation"),
    ],
)
def test_result_names_the_failing_checks(wrong, result):
    assert versions.result_of(wrong) == result


def test_checks_after_one_that_ends_the_job_run_in_another(tmp_path, monkeypatch):
    def job(words, environ, folder, seconds, log):
        if "ranks" in words:
            jobs.append(words[words.index(str(folder)) + 1 :])
            with (folder / "outcomes.jsonl").open("a") as file:
                for name in jobs[-1]:
                    if name in ("b", "d"):
                        return f"killed in {name}"
                    file.write(json.dumps({"check": name, "wrong": ""}) + "\n")
        return "status 0"

    jobs = []
    monkeypatch.setattr(versions, "job", job)
    found = versions.run_checks(Path(sys.executable), {}, tmp_path, ["a", "b", "c", "d"], 1, tmp_path / "log")
    assert jobs == [["a", "b", "c", "d"], ["c", "d"]]
    assert found == {"a": "", "b": "the job ended: killed in b", "c": "", "d": "the job ended: killed in d"}


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({"a": np.arange(3.0) + 1e-13, "b": "x"}, ""),
        ({"a": np.array([0, 1, 2.5]), "b": "x"}, "1 of 2 values differ from one process: a: off by 5.0e-01"),
        ({"a": np.array([0, 1, np.nan]), "b": "y"}, "2 of 2 values.*a: off by nan; b: y instead of x"),
        ({"a": np.arange(2.0), "b": "x"}, r"a: float64\[2\] instead of float64\[3\]"),
        ({"a": np.arange(3), "b": "x"}, r"a: int64\[3\] instead of float64\[3\]"),
        ({"a": np.arange(3.0)}, r"\['a'\] instead of \['a', 'b'\]"),
    ],
)
def test_differences_are_named(found, words):
    text = checks.differences(found, {"a": np.arange(3.0), "b": np.asarray("x")})
    assert bool(text) == bool(words)
    assert re.search(words, text), text
