"""Weights cut along a model axis, on real ranks: Strategy(layout_map=...)."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from harness.launching import python_path
from harness.rank_tests import rank_tests, run_ranks

HERE = Path(__file__).parent
test_mesh = rank_tests(HERE / "mesh_checks.py", [4])


def trained(folder, ranks, epochs):
    """Returns weights and optimizer state at the end of a training in a folder."""
    program = HERE / "mesh_training.py"
    run_ranks(program, ranks, args=[folder, epochs], timeout=240, env={"PYTHONPATH": python_path(HERE.parent)}).check()
    with np.load(folder / f"{ranks}_{epochs}.npz") as arrays:
        return [arrays[name] for name in arrays.files]


@pytest.mark.long
@pytest.mark.parallel
def test_checkpoints_of_a_mesh_are_those_of_one_process_and_resume_on_another(tmp_path):
    trained(tmp_path, 4, 1)
    (tmp_path / "one").mkdir()
    expected = trained(tmp_path / "one", 1, 2)
    for ranks in (2, 1):
        folder = tmp_path / f"on_{ranks}"
        shutil.copytree(tmp_path / "saved", folder / "saved")
        for mine, theirs in zip(trained(folder, ranks, 2), expected, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-12)
