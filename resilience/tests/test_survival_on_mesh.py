"""Ranks of a mesh are killed, the others form a smaller one, and end with the weights of one process."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_survival import PROGRAM, check_ended

from launch.launching import Ended, run, write_program

pytestmark = [pytest.mark.parallel, pytest.mark.quiet, pytest.mark.long]


def check(
    tmp_path: Path, model: str, data: str, where: str, *killed: str, ranks: int, mesh: str, left: list[int]
) -> Ended:
    """`mesh`: at the end. `left`: ranks at the end, as the launcher counts; others were killed, or have left."""
    command = ["run", "-np", f"1:{ranks}", "python", PROGRAM, model, data, where, *killed]
    ended = run(command, tmp_path, env={"EPOCHS": "3"})
    assert ended.status == 0, ended
    lost = {int(each.partition(":")[0]) for each in killed}
    assert len(re.findall(r"rank \d+ was lost \(killed by SIGKILL\)", ended.err)) == len(lost), ended
    leaving = set(range(ranks)) - lost - set(left)
    assert set(map(int, re.findall(r"rank (\d+) leaves \(a mesh of", ended.err))) == leaving, ended
    assert f"mesh {mesh}" in ended.err, ended
    check_ended(ended, left, PROGRAM, model, data, 3)
    return ended


def test_of_two_by_two_ranks_one_is_killed_and_one_has_no_place(tmp_path: Path) -> None:
    ended = check(tmp_path, "mesh2+by8", "arrays", "step", "1:7", ranks=4, mesh="(1, 2)", left=[0, 2])
    assert "the mesh 2 x 2 has lost rank 1 (batch 0, model 1); a mesh of 1 x 2 continues." in ended.err, ended


@pytest.mark.parametrize(
    ("ranks", "model", "data", "killed", "mesh", "left"),
    [
        (4, "mesh2", "arrays", "step 1:7", "(1, 3)", [0, 2, 3]),
        (4, "mesh2+attention", "dataset", "step 3:7", "(1, 2)", [0, 1]),
        (2, "mesh2", "arrays", "step 1:7", "none", [0]),
        (4, "mesh4", "arrays", "step 2:7 1:11", "(1, 2)", [0, 3]),
        (3, "mesh3", "several", "step 0:4 2:9", "none", [1]),
        (5, "mesh1", "arrays", "step 1:7", "none", [0, 2, 3, 4]),
        (6, "mesh2+by8", "arrays", "step 0:3 2:8", "(1, 2)", [1, 3]),
        (4, "mesh2+saving", "arrays", "gather 1:3", "(1, 3)", [0, 2, 3]),
        (4, "mesh2+by8+accumulation", "sequence", "step 2:7", "(1, 2)", [0, 1]),
        (4, "mesh2+by8+two", "arrays", "step 1:7 2:12", "none", [0]),
    ],
)
def test_meshes(ranks: int, model: str, data: str, killed: str, mesh: str, left: list[int], tmp_path: Path) -> None:
    check(tmp_path, model, data, *killed.split(), ranks=ranks, mesh=mesh, left=left)


def test_all_ranks_with_a_slice_are_killed_together(tmp_path: Path) -> None:
    command = ["python", PROGRAM, "mesh2", "arrays", "between", "1:5", "3:5"]
    ended = run(["run", "-np", "1:4", *command], tmp_path)
    assert ended.status == 137 and "were lost together" in ended.err and "--restarts" in ended.err, ended


LAID_OUT = """
import keras
import keras_ddl
layout = keras.distribution.LayoutMap(keras_ddl.device_mesh((1, 2)))
layout[".*"] = (None, "model")
keras_ddl.Strategy(layout=layout)
"""


def test_spares_are_refused(tmp_path: Path) -> None:
    program = write_program(tmp_path, LAID_OUT)
    ended = run(["run", "-np", "1:2", "--spares", "1", "python", program], tmp_path)
    assert ended.status == 1 and "Leave out --spares, and name the hosts with --hosts" in ended.err, ended
