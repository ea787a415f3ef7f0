"""Runs PyTorch's own backend tests on "ddl"."""

import re
from pathlib import Path

import pytest
from torch_needs import TORCH

from launch.launching import run

pytestmark = TORCH
pytest.importorskip("expecttest", reason="PyTorch's own tests need it: pip install expecttest")


@pytest.mark.long
@pytest.mark.parallel
def test_distributed_test_of_pytorch(tmp_path: Path):
    shared = tmp_path / "shared"
    shared.mkdir()
    program = Path(__file__).with_name("own_tests.py")
    command = ["run", "-np", "4", "python", str(program), str(shared)]
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}  # created by the import, and stays
    ended = run(command, tmp_path, env=env, limit_seconds=1200)
    assert ended.status == 0, ended
    assert not re.findall("^failed: .*", ended.out, re.MULTILINE), ended.out
    assert len(re.findall("^passed: ", ended.out, re.MULTILINE)) > 80, ended.out
