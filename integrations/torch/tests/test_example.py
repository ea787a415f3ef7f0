"""The PyTorch example and documentation page run."""

import re
import sys
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
from torch_needs import TORCH

from harness.examples import EXAMPLES, held_out_accuracy, run

pytestmark = [TORCH, pytest.mark.parallel]

PAGE = Path(__file__).resolve().parents[1] / "docs" / "pytorch.md"


@pytest.mark.long
def test_digits_learns_on_two_ranks(tmp_path: Path):
    pytest.importorskip("sklearn", reason="the example uses scikit-learn's digits")
    command = (sys.executable, "-m", "keras_ddl.cli", "run", "-np", 2, sys.executable)
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}  # which stays
    output = run(tmp_path, *command, EXAMPLES / "torch" / "digits.py", "--epochs", 3, env=env)
    losses = [float(each) for each in re.findall(r"loss ([\d.]+)", output)]
    assert len(losses) == 3 and losses[-1] < losses[0] / 2, output
    assert held_out_accuracy(output) > 0.8, output


@pytest.mark.long
def test_keras_on_two_ranks_equals_one_process(tmp_path: Path):
    """Exact if ranks have equally many rows; with a short last batch, each rank's mean has the same weight."""
    versions = [
        each.version for each in metadata.distributions() if each.metadata["Name"] in ("keras", "keras-nightly")
    ]
    if not any(tuple(map(int, each.split(".")[:2])) >= (3, 16) for each in versions):
        pytest.skip("needs Keras 3.16: pip install keras-nightly")
    launcher = (sys.executable, "-m", "keras_ddl.cli", "run", "-np")
    for rows, allowed in ((1440, 1e-6), (1437, 2e-3)):
        found = []
        for ranks in (1, 2):
            file = tmp_path / f"{rows}-{ranks}.npz"
            script = EXAMPLES / "torch" / "keras_digits.py"
            output = run(tmp_path, *launcher, ranks, sys.executable, script, "--rows", rows, "--weights", file)
            found.append((held_out_accuracy(output), np.load(file)))
        (alone, expected), (together, weights) = found
        assert abs(alone - together) < 0.01
        difference = max(np.abs(expected[name] - weights[name]).max() for name in expected)
        assert difference < allowed and (rows == 1440 or difference > 1e-5), difference


def test_code_blocks_of_the_page_run(tmp_path: Path):
    """Runs the blocks without Keras as one script, in one process; other tests cover several ranks."""
    text = PAGE.read_text(encoding="utf-8")
    blocks = re.findall(r"^```py\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    elsewhere = (
        "keras.distribution",
        "keras_ddl.regroup",
        "def take_newest",
        "torch.cuda",
    )  # test_torch_survival.py covers the latter two
    some = [each for each in blocks if not any(words in each for words in elsewhere)]
    assert len(some) == 2
    given = "import torch\nmodel, x = torch.nn.Linear(3, 1), torch.ones(2, 3)\n"
    (tmp_path / "page.py").write_text(given + "\n".join(some))
    run(tmp_path, sys.executable, "page.py", env={"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")})
