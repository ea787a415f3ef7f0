"""Runs the programs of tools/gpu_check.sh on CPU tensors; on a machine with a GPU, the script runs them there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
ROOT = Path(__file__).resolve().parents[3]
CHECKS = ROOT / "tools" / "gpu_check"
LAUNCH = [str(Path(sys.executable).with_name("keras-ddl")), "run", "-np"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("command", "says"),
    [
        ([*LAUNCH, "2", sys.executable, "against_numpy.py"], "results equal NumPy's"),
        ([sys.executable, "killed_rank.py"], "the other rank had the error"),
        ([sys.executable, "speed.py"], "beside gloo"),
        ([sys.executable, "checks.py", "-np", "2", f"{Path(__file__).parent}/collective_checks.py"], "failed: []"),
    ],
    ids=["numpy", "killed rank", "speed", "checks"],
)
def test_programs_run_on_the_cpu(command: list[str], says: str) -> None:
    environment = os.environ | {"GPU_CHECK_DEVICE": "cpu", "GPU_CHECK_SLOWNESS": "5", "PYTHONPATH": f"{ROOT}/tests"}
    done = subprocess.run(
        command, cwd=CHECKS, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=500
    )
    assert done.returncode in (0, 137) and says in done.stdout, done.stdout
