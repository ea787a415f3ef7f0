"""Environments for programs that others wrote: each has its own, from pinned versions, with this project's wheel."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# What pip says when it reaches no registry, as opposed to a version that there is not.
_UNREACHABLE = re.compile(r"NewConnectionError|ConnectTimeout|Name or service not known|from versions: none")


def environment(folder: Path, *requirements: str) -> Path:
    """Returns the folder of the programs of a new environment: pip, python, keras-ddl.

    Args:
        requirements: as pip takes them, with versions. keras_ddl comes from the wheel in build/wheel.
    Skips the test where pip reaches no registry.
    """
    wheels = sorted((ROOT / "build" / "wheel").glob("keras_ddl-*.whl"))
    assert wheels, "make wheel"
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=120)
    command = [str(folder / "bin" / "pip"), "install", "-q", str(wheels[-1]), *requirements]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)
    if done.returncode and _UNREACHABLE.search(done.stderr):
        pytest.skip(f"pip reaches no registry: {done.stderr.strip().splitlines()[-1][:300]}")
    assert done.returncode == 0, done.stderr[-3000:]
    return folder / "bin"


def call(
    programs: Path, folder: Path, *command: object, limit: int = 600, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a command with the programs of an environment, in `folder`; stdout has stderr in it.

    Args:
        limit: seconds after which it is an error.
    """
    inherited = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    own = {"PATH": f"{programs}:{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    folder.mkdir(parents=True, exist_ok=True)
    return subprocess.run(
        [str(programs / str(command[0])), *map(str, command[1:])],
        cwd=folder,
        env={**inherited, **own, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=limit,
        check=False,
    )
