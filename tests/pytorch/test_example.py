"""The example and the page for PyTorch run as they say."""

import re
import sys
from pathlib import Path

import pytest

from harness.examples import EXAMPLES, held_out_accuracy, run

pytest.importorskip("torch.distributed", reason="PyTorch is not installed: pip install '.[torch]'")
pytestmark = pytest.mark.parallel

PAGE = Path(__file__).resolve().parents[2] / "docs" / "pytorch.md"


def test_digits_learns_on_two_ranks(tmp_path: Path):
    pytest.importorskip("sklearn", reason="The example's digits are scikit-learn's")
    command = (sys.executable, "-m", "keras_ddl.cli", "run", "-np", 2, sys.executable)
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}  # which stays
    output = run(tmp_path, *command, EXAMPLES / "torch" / "digits.py", "--epochs", 3, env=env)
    losses = [float(each) for each in re.findall(r"loss ([\d.]+)", output)]
    assert len(losses) == 3 and losses[-1] < losses[0] / 2, output
    assert held_out_accuracy(output) > 0.8, output


def test_blocks_of_the_page_run(tmp_path: Path):
    """Those without Keras, one script: alone, for what ranks do together is tested elsewhere."""
    text = PAGE.read_text(encoding="utf-8")
    blocks = re.findall(r"^```py\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    some = [each for each in blocks if "keras.distribution" not in each]
    assert len(some) == 2
    given = "import torch\nmodel, x = torch.nn.Linear(3, 1), torch.ones(2, 3)\n"
    (tmp_path / "page.py").write_text(given + "\n".join(some))
    run(tmp_path, sys.executable, "page.py", env={"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")})
