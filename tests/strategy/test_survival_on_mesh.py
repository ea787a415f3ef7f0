"""Ranks of a mesh are killed, the others form a smaller one, and end with the weights of one process."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from launch.launching import Ended
from strategy.test_survival import PROGRAM, check_ended, run

pytestmark = [pytest.mark.parallel, pytest.mark.quiet]


def check(
    tmp_path: Path,
    model: str,
    data: str,
    where: str,
    *killed: str,
    ranks: int,
    mesh: str,
    left: list[int],
    min_np: int = 1,
    epochs: int = 3,
) -> Ended:
    """`mesh`: at the end. `left`: ranks at the end, as the launcher counts; others were killed, or have left."""
    arguments = ["python", PROGRAM, model, data, where, *killed]
    env = {"EPOCHS": str(epochs)}
    ended = run(["run", "-np", str(ranks), "--min-np", str(min_np), *arguments], tmp_path, env=env)
    assert ended.status == 0, ended
    lost = {int(each.partition(":")[0]) for each in killed}
    assert len(re.findall(r"rank \d+ was lost \(killed by SIGKILL\)", ended.err)) == len(lost), ended
    leaving = set(range(ranks)) - lost - set(left)
    assert set(map(int, re.findall(r"rank (\d+) leaves \(a mesh of", ended.err))) == leaving, ended
    assert f"mesh {mesh}" in ended.err, ended
    check_ended(ended, left, PROGRAM, model, data, epochs)
    return ended


def test_a_rank_of_two_by_two_is_killed_and_three_go_on(tmp_path: Path) -> None:
    """The other extents are divided by three."""
    ended = check(tmp_path, "mesh2", "arrays", "step", "1:7", ranks=4, mesh="(1, 3)", left=[0, 2, 3])
    assert "of the mesh 2 x 2, rank 1 (batch 0, model 1) was lost; 1 x 3 go on." in ended.err, ended
