"""Virtual environments and programs for the packaging tests.

This module is not in tests/packaging, because `packaging.<name>` would belong to the distribution `packaging`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness.source_modules import load_program

ROOT = Path(__file__).resolve().parents[2]
# The requirements of keras_ddl.communicator on several ranks; one test installs the full set of dependencies.
RUNTIME = ("numpy", "mpi4py>=4.1", "cloudpickle", "click")

HELLO = """
import os, sys
import numpy as np
import keras_ddl
from keras_ddl import communicator
from keras_ddl.communicator.native import native_library
keras_ddl.init()
assert keras_ddl.size() == 2, keras_ddl.size()
total = communicator.all_reduce_array(np.arange(1000.0) + keras_ddl.rank())
assert np.array_equal(total, 2 * np.arange(1000.0) + 1)
assert "tensorflow" not in sys.modules
keras_ddl.barrier()
with open(f"{sys.argv[1]}/{keras_ddl.rank()}", "w") as file:
    mpi = native_library.mpi_text("ddl_mpi_loaded_path")
    file.write("\\n".join([keras_ddl.__file__, mpi, communicator.describe()]))
"""


def clean_environment(**variables: str) -> dict[str, str]:
    unwanted = ("OMPI_", "PMIX_", "PMI_", "MPI4PY_", "KERAS_DDL_", "PYTHON", "VIRTUAL_ENV", "MPICC")
    env = {name: value for name, value in os.environ.items() if not name.startswith(unwanted)}
    env["OMPI_ALLOW_RUN_AS_ROOT"] = env["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
    return env | variables


def run(*command: str | Path, cwd: Path, timeout: float = 400, **variables: str) -> str:
    """Runs a command in a clean environment and returns its output; fails the test with all of it."""
    result = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=clean_environment(**variables),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )
    assert result.returncode == 0, f"{command}\n{result.stdout}"
    return result.stdout


@dataclass(frozen=True)
class Venv:
    """A virtual environment that uses the outer pip, which saves installing one."""

    path: Path

    @property
    def python(self) -> Path:
        return self.path / "bin" / "python"

    def pip_install(self, *arguments: str | Path, **variables: str) -> str:
        return run(
            *(sys.executable, "-m", "pip", "--python", self.python, "install", "-q", "--no-compile", *arguments),
            cwd=self.path,
            **variables,
        )

    def run_two_ranks(self, launcher: Path | None, folder: Path, **variables: str) -> list[list[str]]:
        """Runs HELLO on 2 ranks from `folder`; returns each rank's lines: package file, MPI library, description."""
        folder.mkdir()
        launcher = launcher or self.path / "bin" / "mpirun"
        unbound = ["--bind-to", "none", "--oversubscribe"] if launcher.name == "mpirun" else []
        run(*(launcher, *unbound, "-n", "2", self.python, "-c", HELLO, folder), cwd=folder, timeout=300, **variables)
        return [(folder / str(rank)).read_text().splitlines() for rank in range(2)]

    def run_and_fail(self, *command: str | Path, **variables: str) -> str:
        """Runs a command that must fail, and not hang; returns its output."""
        with pytest.raises(AssertionError) as failure:
            run(*command, cwd=self.path, timeout=300, **variables)
        return str(failure.value)


def make_venv(path: Path, python: str | Path = sys.executable) -> Venv:
    run(python, "-m", "venv", "--without-pip", path, cwd=path.parent)
    return Venv(path)


def kept_wheel() -> Path | None:
    """Returns the wheel of these sources that `make wheel` left, or None."""
    return load_program(ROOT / "tools" / "wheel.py").kept(ROOT / "build" / "wheel")
