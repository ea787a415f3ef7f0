"""Checkpoints of optimizers in shards: Strategy(sharding="optimizer"). test_strategy.py trains with them."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from harness.launching import python_path
from harness.rank_tests import run_ranks
from keras_ddl import checkpoint as ckpt
from launch.launching import run

FEW = {"KERAS_DDL_SHARD_FROM_ELEMENTS": "2"}  # of small models' weights, all
HERE = Path(__file__).parent


def trained(folder, ranks, epochs, kind):
    """Returns weights and optimizer state at the end, which all runs of so many epochs have in common."""
    program = HERE / "sharded_training.py"
    run_ranks(
        program, ranks, args=[folder, epochs, kind], timeout=180, env={**FEW, "PYTHONPATH": python_path(HERE.parent)}
    ).check()
    with np.load(folder / f"{kind}_{ranks}_{epochs}.npz") as arrays:
        return [arrays[name] for name in arrays.files]


@pytest.mark.long
@pytest.mark.parallel
@pytest.mark.parametrize(("kind", "whole"), [("sharded", "whole"), ("tables", "whole tables")])
def test_checkpoints_are_complete_and_resume_on_any_number_of_ranks(tmp_path, kind, whole):
    trained(tmp_path, 3, 2, kind)
    saved = tmp_path / "saved"
    found = {}
    for ranks, kind_then in ((2, kind), (3, whole), (1, kind)):
        folder = tmp_path / f"{kind_then}_{ranks}"
        shutil.copytree(saved, folder / "saved")
        found[kind_then, ranks] = trained(folder, ranks, 4, kind_then)
    (tmp_path / "one").mkdir()
    expected = trained(tmp_path / "one", 1, 4, whole)
    for arrays in found.values():
        for mine, theirs in zip(arrays, expected, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-12)
    bundles = ("optimizer", "weights") if kind == "tables" else ("optimizer",)
    for each in ckpt.list_checkpoints(saved):
        assert all(len(list(each.path.glob(f"{name}.data-*"))) == 3 for name in bundles)
    # And back: what was saved whole goes on in shards.
    shutil.copytree(tmp_path / "one" / "saved", tmp_path / "back" / "saved")
    again = trained(tmp_path / "back", 3, 6, kind)
    for mine, theirs in zip(again, trained(tmp_path / "one", 1, 6, whole), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-12)


@pytest.mark.long
@pytest.mark.parallel
@pytest.mark.parametrize(("kind", "victim"), [("sharded", 0), ("sharded", 2), ("tables", 1)])
def test_rank_lost_while_writing_shards_leaves_usable_checkpoints(tmp_path, kind, victim):
    (tmp_path / "one").mkdir()
    expected = trained(tmp_path / "one", 1, 4, "whole tables" if kind == "tables" else "whole")
    program = str(HERE / "sharded_training.py")
    command = ["run", "-np", "1:3", "python", program, str(tmp_path), "4", kind, str(victim)]
    ended = run(command, tmp_path, env={**FEW, "PYTHONPATH": python_path(HERE.parent)})
    assert ended.status == 0, ended
    with np.load(tmp_path / f"{kind}_2_4.npz") as arrays:
        for name, theirs in zip(arrays.files, expected, strict=True):
            np.testing.assert_allclose(arrays[name], theirs, rtol=0, atol=1e-12)
    saved = ckpt.list_checkpoints(tmp_path / "saved")
    assert saved[-1].step == 20, saved
    for each in saved:
        ckpt.validate(each)
