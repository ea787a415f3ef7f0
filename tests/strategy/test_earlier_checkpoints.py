"""Checkpoints of an earlier version can be resumed on other numbers of ranks.

earlier_checkpoints.tar.xz was written by commit 8ba281e0 (0.1.0) with sharded_training.py FOLDER 1 KIND and
mesh_training.py FOLDER 1 2 (mesh) or 2+shards (mesh_shards). It holds the latest checkpoint of each run, from within or
from the end of the epoch. Do not overwrite it: add another file.
"""

import tarfile
from pathlib import Path

import numpy as np
import pytest

from harness.launching import python_path
from harness.rank_tests import run_ranks
from keras_ddl import checkpoint as ckpt

HERE = Path(__file__).parent
CASES = {  # written by 3, 2, 2, 2 x 2, and 2 x 2 ranks
    "sharded": ("sharded_training.py", [(2, "sharded"), (1, "whole")]),
    "weights": ("sharded_training.py", [(3, "weights")]),
    "whole": ("sharded_training.py", [(3, "sharded")]),
    "mesh": ("mesh_training.py", [(2, "2")]),
    "mesh_shards": ("mesh_training.py", [(4, "2"), (2, "1")]),
}


def trained(folder, program, ranks, kind):
    """Resumes or starts a training in `folder`; returns weights and optimizer state after two epochs."""
    environment = {"KERAS_DDL_SHARD_FROM_ELEMENTS": "2", "PYTHONPATH": python_path(HERE.parent)}
    run_ranks(HERE / program, ranks, args=[folder, 2, kind], env=environment).check()
    (path,) = folder.glob("*.npz")
    with np.load(path) as arrays:
        return [arrays[name] for name in arrays.files]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    """Returns a function that trains a program in one process, once per program."""
    found = {}

    def trained_alone(program, kind):
        if program not in found:
            found[program] = trained(tmp_path_factory.mktemp("one"), program, 1, kind)
        return found[program]

    return trained_alone


@pytest.mark.long
@pytest.mark.parallel
@pytest.mark.parametrize("written_as", CASES)
def test_checkpoint_of_an_earlier_version_resumes(written_as, one_process, tmp_path):
    program, resumes = CASES[written_as]
    expected = one_process(program, "1" if program.startswith("mesh") else "whole")
    for ranks, kind in resumes:
        folder = tmp_path / f"{kind}_{ranks}"
        with tarfile.open(HERE / "earlier_checkpoints.tar.xz") as archive:
            members = [each for each in archive if each.name.startswith(f"{written_as}/")]
            archive.extractall(tmp_path / "unpacked", members, filter="data")
        (tmp_path / "unpacked" / written_as).rename(folder)
        ckpt.validate(ckpt.latest(folder / "saved"))
        for mine, theirs in zip(trained(folder, program, ranks, kind), expected, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-12)
