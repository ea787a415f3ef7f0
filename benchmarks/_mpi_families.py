"""The peers of benchmarks/all_reduce.py: MPI libraries from the package index.

Each has its own virtual environment, made on first use, because their launchers have the same names.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Family:
    """An MPI library: its installation, and the start of ranks under it.

    Attributes:
        wheel: the library's package.
        launcher: its command, relative to the environment's bin/, and the arguments before "-n RANKS".
        environment: variables that it needs.
    """

    wheel: str
    launcher: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)

    def command(self, folder: Path | None, ranks: int, program: list[str]) -> list[str]:
        """Returns the command that starts `program` (arguments of Python) on `ranks` ranks of this machine.

        `folder`: as for `prepare`; None: this environment, which has the library (`installed_families`).
        """
        bin_folder = Path(sys.executable).parent if folder is None else self.prepare(folder)
        launcher = [str(bin_folder / self.launcher[0]), *self.launcher[1:], "-n", str(ranks)]
        return [*launcher, str(bin_folder / "python"), *program]

    def prepare(self, folder: Path) -> Path:
        """Makes the environment under `folder` unless it exists; returns its bin/."""
        home = folder / self.wheel
        done = home / ".complete"
        if not done.exists():
            print(f"installing {self.wheel} into {home} ...", file=sys.stderr, flush=True)
            subprocess.run([sys.executable, "-m", "venv", home], check=True)
            install = [home / "bin" / "python", "-m", "pip", "install", "-q", self.wheel, "mpi4py>=4.1", "numpy"]
            subprocess.run(install, check=True)
            done.touch()
        return home / "bin"


def installed_families() -> list[str]:
    """Returns the family that this Python's environment has together with mpi4py: a list of one name, or none."""
    names = {(each.metadata["Name"] or "").lower() for each in importlib.metadata.distributions(path=sys.path)}
    return [name for name, family in FAMILIES.items() if {family.wheel, "mpi4py"} <= names]


_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"} if os.geteuid() == 0 else {}

FAMILIES = {
    "openmpi": Family("openmpi", ("mpirun", "--bind-to", "none", "--oversubscribe"), _ROOT),
    "mpich": Family("mpich", ("mpiexec",)),
    # I_MPI_PIN would restrict all ranks to the same cores, those of the benchmark's parent. Ranks pin themselves.
    "impi-rt": Family("impi-rt", ("mpiexec.hydra",), {"I_MPI_FABRICS": "shm", "I_MPI_PIN": "0"}),
}
