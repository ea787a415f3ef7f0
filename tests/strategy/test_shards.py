"""Optimizers in shards: Strategy(shard_optimizer=True)."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from harness.launching import python_path
from harness.rank_tests import rank_tests, run_ranks

FEW = {"KERAS_DDL_SHARD_FROM_ELEMENTS": "2"}  # of small models' weights, all
HERE = Path(__file__).parent
test_shards = rank_tests(HERE / "shard_checks.py", [3], env=FEW)

# Weights in shards, which are gathered anew wherever one is needed.
test_weights = rank_tests(HERE / "weight_checks.py", [2], env={**FEW, "KERAS_DDL_GATHERED_WEIGHT_BYTES": "1"})


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
def test_checkpoints_are_whole_and_resume_at_any_number_of_ranks(tmp_path):
    trained(tmp_path, 3, 2, "sharded")
    saved = tmp_path / "saved"
    found = {}
    for ranks, kind in ((2, "sharded"), (3, "whole"), (1, "sharded")):
        folder = tmp_path / f"{kind}_{ranks}"
        shutil.copytree(saved, folder / "saved")
        found[kind, ranks] = trained(folder, ranks, 4, kind)
    (tmp_path / "one").mkdir()
    expected = trained(tmp_path / "one", 1, 4, "whole")
    for arrays in found.values():
        for mine, theirs in zip(arrays, expected, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-12)
    # And back: what was saved whole goes on in shards.
    shutil.copytree(tmp_path / "one" / "saved", tmp_path / "back" / "saved")
    again = trained(tmp_path / "back", 3, 6, "sharded")
    for mine, theirs in zip(again, trained(tmp_path / "one", 1, 6, "whole"), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-12)
