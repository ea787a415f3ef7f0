"""Ranks of a mesh are killed; the others form a smaller mesh and end with the weights of one process."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
from test_survival import LOST, PROGRAM, check_ended

from launch.launching import Ended, run

pytestmark = [pytest.mark.parallel, pytest.mark.quiet, pytest.mark.long]


def check(
    tmp_path: Path,
    model: str,
    data: str,
    where: str,
    *killed: str,
    ranks: int,
    mesh: str,
    remaining: list[int],
    spares: int = 0,
) -> Ended:
    """`mesh`: the final mesh. `remaining`: launcher numbers of the final ranks; others were killed or left. `spares`:
    all of them join.
    """
    options = ["--spares", str(spares)] if spares else []
    command = ["run", "-np", f"1:{ranks}", *options, "python", PROGRAM, model, data, where, *killed]
    epochs = 12 if spares else 3
    ended = run(command, tmp_path, env={"EPOCHS": str(epochs)} | ({"AWAITED": str(ranks)} if spares else {}))
    assert ended.status == 0, ended
    lost = {int(each.partition(":")[0]) for each in killed}
    assert len(re.findall(LOST, ended.err)) == len(lost), ended
    leaving = set(range(ranks + spares)) - lost - set(remaining)
    assert set(map(int, re.findall(r"rank (\d+) leaves \(a mesh of", ended.err))) == leaving, ended
    assert f"mesh {mesh}" in ended.err, ended
    check_ended(ended, remaining, PROGRAM, model, data, epochs)
    return ended


def test_two_by_two_ranks_lose_one_and_another_has_no_place(tmp_path: Path) -> None:
    ended = check(tmp_path, "mesh2+by8", "arrays", "step", "1:7", ranks=4, mesh="(1, 2)", remaining=[0, 2])
    assert "the mesh 2 x 2 has lost rank 1 (batch 0, model 1); a mesh of 1 x 2 continues." in ended.err, ended


@pytest.mark.parametrize(
    ("ranks", "model", "data", "killed", "mesh", "remaining"),
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
def test_meshes(
    ranks: int, model: str, data: str, killed: str, mesh: str, remaining: list[int], tmp_path: Path
) -> None:
    check(tmp_path, model, data, *killed.split(), ranks=ranks, mesh=mesh, remaining=remaining)


@pytest.mark.parametrize(
    ("ranks", "model", "data", "killed", "mesh", "remaining"),
    [
        (4, "mesh2+chosen", "arrays", "step 1:0", "(1, 3)", [0, 2, 3]),  # before or after the choice
        (4, "mesh2+chosen", "arrays", "between 1:0", "(1, 3)", [0, 2, 3]),
        (4, "mesh2+by8+chosen", "dataset", "step 1:7 2:12", "none", [0]),
        (2, "mesh2+chosen+two", "arrays", "step 0:3", "none", [1]),
        (4, "mesh2+chosen+attention", "arrays", "step 3:7", "(1, 2)", [0, 1]),
    ],
)
def test_meshes_with_a_chosen_layout(
    ranks: int, model: str, data: str, killed: str, mesh: str, remaining: list[int], tmp_path: Path
) -> None:
    check(tmp_path, model, data, *killed.split(), ranks=ranks, mesh=mesh, remaining=remaining)


@pytest.mark.parametrize(
    ("ranks", "model", "data", "killed", "mesh", "remaining"),
    [
        (4, "mesh2+shards", "arrays", "step 1:7", "(1, 3)", [0, 2, 3]),
        (4, "mesh2+by8+shards+two", "arrays", "step 1:7 2:12", "none", [0]),
        (6, "mesh2+by8+shards", "dataset", "step 0:3 2:8", "(1, 2)", [1, 3]),
        (6, "mesh3+shards+saving", "arrays", "gather 1:3", "(1, 4)", [0, 2, 3, 4]),  # 5 do not divide 12
    ],
)
def test_meshes_with_sharded_optimizers(
    ranks: int, model: str, data: str, killed: str, mesh: str, remaining: list[int], tmp_path: Path
) -> None:
    check(tmp_path, model, data, *killed.split(), ranks=ranks, mesh=mesh, remaining=remaining)


def test_all_ranks_with_a_slice_are_killed_together(tmp_path: Path) -> None:
    command = ["python", PROGRAM, "mesh2", "arrays", "between", "1:5", "3:5"]
    ended = run(["run", "-np", "1:4", *command], tmp_path)
    assert ended.status == 137 and "were lost together" in ended.err and "--restarts" in ended.err, ended


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("model", "data"), [("mesh2", "arrays"), ("mesh2+shards", "dataset"), ("mesh2+chosen", "arrays")]
)
def test_one_of_two_by_two_is_killed_at_a_random_moment(model: str, data: str, seed: int, tmp_path: Path) -> None:
    rng = random.Random(f"{model} {data} {seed}")
    killed = rng.randrange(4)
    remaining = [rank for rank in range(4) if rank != killed]
    check(
        tmp_path, model, data, "moment", f"{killed}:{rng.randrange(300)}", ranks=4, mesh="(1, 3)", remaining=remaining
    )


def test_mesh_grows_back_when_a_spare_joins(tmp_path: Path) -> None:
    job = {"ranks": 4, "spares": 1, "mesh": "(2, 2)", "remaining": [0, 2, 3, 4]}
    ended = check(tmp_path, "mesh2", "arrays", "step", "1:7", **job)
    assert "a mesh of 1 x 3 continues." in ended.err, ended
    assert "the mesh 1 x 3 has become a mesh of 2 x 2." in ended.err, ended


def test_mesh_grows_when_two_spares_join_after_a_rank_has_left(tmp_path: Path) -> None:
    job = {"ranks": 4, "spares": 2, "mesh": "(2, 2)", "remaining": [0, 2, 4, 5]}
    ended = check(tmp_path, "mesh2+by8", "arrays", "step", "1:7", **job)
    assert "spare rank 5 takes the place of rank 3." in ended.err, ended
    assert "the mesh 1 x 2 has become a mesh of 2 x 2." in ended.err, ended


@pytest.mark.parametrize(
    ("ranks", "model", "data", "killed", "spares", "remaining"),
    [
        (2, "mesh2", "dataset", "step 0:7", 1, [1, 2]),
        (2, "mesh2+attention", "sequence", "step 1:7", 1, [0, 2]),
        (4, "mesh4+saving", "arrays", "step 2:7", 1, [0, 1, 3, 4]),
        (3, "mesh3+two", "several", "step 1:7 0:12", 2, [2, 3, 4]),
        (2, "mesh2", "arrays", "step 1:7 2:0:joining", 2, [0, 3]),
        (4, "mesh2+shards", "arrays", "step 1:7", 1, [0, 2, 3, 4]),
        (4, "mesh2+chosen", "arrays", "step 1:7", 1, [0, 2, 3, 4]),
        (2, "mesh2+chosen+two", "dataset", "step 0:3", 1, [1, 2]),
        (2, "mesh2+shards+attention", "dataset", "step 1:7", 1, [0, 2]),
    ],
)
def test_meshes_grow(
    ranks: int, model: str, data: str, killed: str, spares: int, remaining: list[int], tmp_path: Path
) -> None:
    model_size = next(int(each) for each in model if each.isdigit())
    job = {"ranks": ranks, "spares": spares, "mesh": str((ranks // model_size, model_size)), "remaining": remaining}
    check(tmp_path, model, data, *killed.split(), **job)
