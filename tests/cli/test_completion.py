"""Completion in a shell, as docs/launch.md has it set up."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = Path(sys.executable).with_name("keras-ddl")


def proposed(*words: str) -> set[str]:
    """Returns what completes the last of `words`."""
    environment = {"_KERAS_DDL_COMPLETE": "bash_complete", "COMP_CWORD": str(len(words))}
    environment |= {"COMP_WORDS": " ".join(["keras-ddl", *words])}
    done = subprocess.run([COMMAND], env={**os.environ, **environment}, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return {line.partition(",")[2] for line in done.stdout.splitlines()}


def test_commands_and_options_are_proposed() -> None:
    assert proposed("") >= {"run", "export", "serve", "predict", "bench", "trace", "doctor", "info"}
    assert proposed("ser") == {"serve"}
    assert {"--hosts", "--hostfile"} <= proposed("run", "--host")
    assert proposed("export", "--format", "t") == {"tflite"}


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_the_command(tmp_path: Path) -> None:
    program = """
set -e
eval "$(_KERAS_DDL_COMPLETE=bash_source keras-ddl)"
complete -p keras-ddl
COMP_WORDS=(keras-ddl run --hostf) COMP_CWORD=2
_keras_ddl_completion keras-ddl --hostf run
echo "${COMPREPLY[@]}"
"""
    environment = {**os.environ, "PATH": f"{COMMAND.parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", program], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    registered, completed = done.stdout.splitlines()
    assert registered.endswith("keras-ddl")
    assert completed == "--hostfile"
