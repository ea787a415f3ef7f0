"""Weights cut along a model axis, on real ranks: Strategy(layout=...)."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from harness.launching import python_path
from harness.rank_tests import rank_tests, run_ranks
from keras_ddl import checkpoint as ckpt
from keras_ddl.files import durable

HERE = Path(__file__).parent
test_mesh = rank_tests(HERE / "mesh_checks.py", [4])
FURTHER = [HERE / f"mesh_{kind}_checks.py" for kind in ("saving", "shard", "choice")]
test_further = pytest.mark.long(rank_tests(FURTHER, [4]))


def train(folder, data_ranks, model_ranks, epochs, *kill):
    """Runs a training in `folder`. `kill`: the rank to kill, and when."""
    program, ranks = HERE / "mesh_training.py", data_ranks * model_ranks
    environment = {"PYTHONPATH": python_path(HERE.parent)}
    return run_ranks(program, ranks, args=[folder, epochs, model_ranks, *kill], env=environment)


def trained(folder, data_ranks, model_ranks, epochs):
    """Trains in `folder` and returns weights and optimizer state."""
    train(folder, data_ranks, model_ranks, epochs).check()
    with np.load(folder / f"{data_ranks * model_ranks}_{epochs}.npz") as arrays:
        return [arrays[name] for name in arrays.files]


def assert_close(mine, expected):
    for each, other in zip(mine, expected, strict=True):
        np.testing.assert_allclose(each, other, rtol=0, atol=1e-12)


@pytest.mark.long
@pytest.mark.parallel
def test_checkpoints_of_a_mesh_resume_on_others(tmp_path):
    trained(tmp_path, 2, 2, 1)
    for each in ckpt.list_checkpoints(tmp_path / "saved"):
        ckpt.validate(each)
    (tmp_path / "one").mkdir()
    expected = trained(tmp_path / "one", 1, 1, 2)
    for data_ranks, model_ranks in ((1, 1), (4, 1), (1, 4), (3, 1)):
        folder = tmp_path / f"on_{data_ranks}x{model_ranks}"
        shutil.copytree(tmp_path / "saved", folder / "saved")
        assert_close(trained(folder, data_ranks, model_ranks, 2), expected)


@pytest.mark.long
@pytest.mark.parallel
def test_training_killed_while_writing_resumes_from_the_last_complete_checkpoint(tmp_path):
    (tmp_path / "one").mkdir()
    expected = trained(tmp_path / "one", 1, 1, 4)
    for (data_ranks, model_ranks), rank, moment, step in (
        ((2, 2), 1, "writes its part", 2),
        ((1, 4), 3, "has written its part", 4),
        ((1, 2), 0, "merges", 6),
        ((2, 2), 0, "has merged", 8),
        ((1, 2), 0, "publishes", 8),
        ((1, 4), 0, "has published", 10),
    ):
        assert train(tmp_path, data_ranks, model_ranks, 4, rank, moment).returncode not in (0, None)
        found = ckpt.list_checkpoints(tmp_path / "saved")
        assert found[-1].step == step, (moment, [each.step for each in found])
        for each in found:
            ckpt.validate(each)
    assert_close(trained(tmp_path, 3, 1, 4), expected)
    assert not [entry for entry in (tmp_path / "saved").iterdir() if entry.name.startswith(durable.TEMPORARY)]
