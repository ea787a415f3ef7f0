"""Larger networks on a mesh: trained on 2 x 2 ranks, killed, resumed on 1 x 2, exported, and served."""

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest

from harness.needed_parts import needs_part
from harness.rank_tests import run_ranks

PROGRAM = Path(__file__).with_name("mesh_program.py")
STEPS = 6
pytestmark = [pytest.mark.long, pytest.mark.parallel]


def train(network, folder, ranks, model_ranks, **env):
    folder.mkdir(exist_ok=True)
    return run_ranks(PROGRAM, ranks, args=[network, folder, model_ranks, STEPS], timeout=900, env=env)


def arrays_of(folder, ranks):
    with np.load(folder / f"{ranks}.npz") as arrays:
        return [arrays[each] for each in arrays.files]


@needs_part("export")
@needs_part("serving")
@pytest.mark.parametrize(("network", "relative"), [("gpt2", 1e-9), ("llama", 1e-9), ("resnet50", 1e-7), ("dlrm", 1e-4)])
def test_network_is_killed_on_one_mesh_resumed_on_another_and_served(network, relative, tmp_path):
    from harness.serving import COMMAND, serving

    train(network, tmp_path / "one", 1, 1).check()
    expected = arrays_of(tmp_path / "one", 1)
    folder = tmp_path / "mesh"
    killed = train(network, folder, 4, 2, DIE_AT_STEP="5")
    assert killed.returncode != 0 and not (folder / "4.npz").exists(), killed.text()
    train(network, folder, 2, 2).check()
    found = arrays_of(folder, 2)
    for mine, theirs in zip(found, expected, strict=True):
        # Biases that a normalization undoes have gradients that are nothing but rounding.
        scale = max(np.abs(theirs).max(), 1e-2)
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=relative * scale)
    served = tmp_path / "served"
    for each, weights in ((served, folder), (tmp_path / "served_one", tmp_path / "one")):
        subprocess.run([COMMAND, "export", weights / "saved", each], check=True, timeout=600, capture_output=True)
    with serving(served) as server:
        server.wait_for(1)
        rows = json.loads((folder / "rows.json").read_text())
        status, answer = server.rest("POST", "/v1/models/model:predict", {"inputs": rows})
        assert status == 200, answer
    np.testing.assert_allclose(answer["outputs"], found[0], rtol=1e-4, atol=1e-5)


def test_table_of_ten_million_rows_is_cut_along_them(tmp_path):
    env = {"TABLE_ROWS": "10000000", "TABLES": "1"}
    train("dlrm", tmp_path, 4, 4, **env).check()
    peaks = [int((tmp_path / f"peak_{rank}.txt").read_text()) for rank in range(4)]
    table = 10_000_000 * 16 * 4 * 3  # with two slots
    assert max(peaks) < table, peaks
