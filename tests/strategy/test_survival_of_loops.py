"""Loops of `strategy.function` go on when ranks are killed, and end with what one process computes; or say why not."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.launching import run
from strategy.test_survival import check

PROGRAM = str(Path(__file__).with_name("surviving_loop.py"))
pytestmark = [pytest.mark.parallel, pytest.mark.quiet]


def test_a_rank_is_killed_in_the_middle_of_a_step(tmp_path: Path) -> None:
    check(tmp_path, "steps", "-", "step", "1:5", program=PROGRAM)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["shards", "gan", "method", "open", "two"])
def test_kinds(kind: str, tmp_path: Path) -> None:
    check(tmp_path, kind, "-", "step", "2:6", program=PROGRAM)


@pytest.mark.long
@pytest.mark.parametrize("moment", ["step 1:0", "between 2:0", "between 1:7", "step 1:3 2:8", "between 2:5 1:6"])
@pytest.mark.parametrize("kind", ["shards", "two"])
def test_moments(kind: str, moment: str, tmp_path: Path) -> None:
    check(tmp_path, kind, "-", *moment.split(), program=PROGRAM)


WHY = {
    "iterator": "IteratorGetNext",
    "drawn": "RandomStandardNormal (",
    "rows": "batches='rank', rows of each rank's own",
    "collective": "a collective outside of these",
}


@pytest.mark.long
@pytest.mark.parametrize("kind", WHY)
def test_why_a_job_ends(kind: str, tmp_path: Path) -> None:
    where = "collective" if kind == "collective" else "step"
    ended = run(["run", "-np", "3", "--min-np", "1", "python", PROGRAM, kind, "-", where, "1:5"], tmp_path)
    assert ended.status != 0, ended
    told = [line for line in ended.err.splitlines() if line.startswith("keras-ddl: ranks 0, 2: ")]
    assert told and "The other ranks do not go on without rank 1. " in told[-1], ended
    assert WHY[kind] in told[-1] and "--restarts" in told[-1], ended
