"""Environments with pinned versions for programs by others.

`layered` is created once, on top of the test environment's packages; `fresh` has this project's wheel and nothing
else of this project.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
FOLDER = ROOT / "build" / "works-with"
_LAYERED = {"requirements.txt": [], "requirements-no-deps.txt": ["--no-deps"]}
# pip's output if it reaches no registry, as opposed to a version that does not exist.
_UNREACHABLE = re.compile(r"NewConnectionError|ConnectTimeout|Name or service not known|from versions: none")


def layered() -> Path:
    """Returns the Python of the environment with the packages of requirements*.txt; creates it first if needed.

    Skips the test if pip reaches no registry.
    """
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # other workers of pytest
        return _layered()


def _layered() -> Path:
    # `addsitedir` also runs the .pth files there, of which one finds keras_ddl, whose install is editable.
    packages = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})"
    wanted = "".join((HERE / name).read_text() for name in _LAYERED) + packages
    stamp, venv = FOLDER / "installed", FOLDER / "venv"
    digest = hashlib.sha256(wanted.encode()).hexdigest()
    executable = venv / "bin" / "python"
    if stamp.exists() and stamp.read_text() == digest:
        return executable
    stamp.unlink(missing_ok=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(venv)], check=True, timeout=120)
    (own,) = venv.glob("lib/python3*/site-packages")
    (own / "packages_of_the_tests.pth").write_text(packages)
    for name, options in _LAYERED.items():
        _install(executable, "--no-compile", *options, "-r", str(HERE / name))
    stamp.write_text(digest)
    return executable


def fresh(folder: Path, *requirements: str) -> Path:
    """Returns the folder of the programs in a new environment: pip, python, keras-ddl.

    Args:
        requirements: requirements for pip, with versions. keras_ddl comes from the wheel in build/wheel.
    Skips the test if pip reaches no registry.
    """
    wheels = sorted((ROOT / "build" / "wheel").glob("keras_ddl-*.whl"))
    assert wheels, "make wheel"
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=120)
    _install(folder / "bin" / "python", str(wheels[-1]), *requirements)
    return folder / "bin"


def _install(python: Path, *arguments: str) -> None:
    """Runs pip install. Skips the test if it reaches no registry; any other failure of pip fails the test."""
    command = [str(python), "-m", "pip", "install", "-q", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    if done.returncode and _UNREACHABLE.search(done.stderr):
        pytest.skip(f"pip reaches no registry: {done.stderr.strip().splitlines()[-1][:300]}")
    assert done.returncode == 0, done.stderr[-3000:]


def call(
    programs: Path, folder: Path, *command: object, limit: int = 600, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a command with the programs of an environment, in `folder`; stdout includes stderr.

    Args:
        limit: seconds after which the test fails.
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
