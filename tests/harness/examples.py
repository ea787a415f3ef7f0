"""Runs the scripts in examples/ as their readers do."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(folder: Path, *words: object, status: int = 0, env: Mapping[str, str] | None = None) -> str:
    """Returns the output of a command run in `folder`; fails the test unless the command ended with `status`.

    `env`: variables to add to those of this process.
    """
    done = subprocess.run(
        [str(word) for word in words],
        cwd=folder,
        env={**os.environ, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == status, done.stdout[-6000:]
    return done.stdout


def held_out_accuracy(output: str) -> float:
    """Returns the accuracy that an example reports."""
    return float(re.search(r"held-out accuracy ([\d.]+)", output)[1])
