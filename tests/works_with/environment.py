"""The environment of the programs of others: what they need, on top of the packages of the tests' environment."""

from __future__ import annotations

import fcntl
import hashlib
import subprocess
import sys
import sysconfig
from pathlib import Path

HERE = Path(__file__).parent
FOLDER = HERE.parents[1] / "build" / "works-with"
_REQUIREMENTS = {"requirements.txt": [], "requirements-no-deps.txt": ["--no-deps"]}


class NoRegistry(Exception):
    """pip could not install the packages; says its last words."""


def python() -> Path:
    """Returns the Python of the environment, which is made first if need be. Raises: NoRegistry"""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # other workers of pytest
        return _python()


def _python() -> Path:
    packages = sysconfig.get_path("purelib")
    wanted = "".join((HERE / name).read_text() for name in _REQUIREMENTS) + packages
    stamp, venv = FOLDER / "installed", FOLDER / "venv"
    digest = hashlib.sha256(wanted.encode()).hexdigest()
    executable = venv / "bin" / "python"
    if stamp.exists() and stamp.read_text() == digest:
        return executable
    stamp.unlink(missing_ok=True)
    _run(sys.executable, "-m", "venv", "--clear", str(venv))
    (own,) = venv.glob("lib/python3*/site-packages")
    (own / "packages_of_the_tests.pth").write_text(packages)
    for name, options in _REQUIREMENTS.items():
        _run(str(executable), "-m", "pip", "install", "-q", "--no-compile", *options, "-r", str(HERE / name))
    stamp.write_text(digest)
    return executable


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    if done.returncode:
        raise NoRegistry(next(iter(done.stderr.strip().splitlines()[::-1]), f"status {done.returncode}"))
