"""Finds the launcher of this process and what it says about the ranks.

This is valid until the ranks are connected; from then on, ask the communicator.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from keras_ddl import config


@dataclass(frozen=True)
class Launcher:
    """The launcher that started this process, and the rank that it assigned.

    Attributes:
        size: number of ranks; None if unknown.
        directory: holds the sockets of this host's ranks, if they were started without MPI.
        num_hosts: number of hosts on which the ranks were started, if without MPI.
    """

    name: str
    rank: int
    size: int | None
    directory: str | None = None
    num_hosts: int = 1

    @property
    def is_spare(self) -> bool:
        """Whether this process waits to replace a lost rank (launch/regroup/regrouping.py)."""
        return self.size is not None and self.rank >= self.size


# Open MPI comes first: its mpirun inside a Slurm allocation sets both kinds. PMIX_RANK comes last: Open MPI and Slurm
# set it as well, and it has no variable for the size.
_LAUNCHERS = (
    ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("MPICH or Intel MPI", "PMI_RANK", "PMI_SIZE"),
    ("MVAPICH", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    # Only srun's tasks have a step; salloc's shell and sbatch's script have SLURM_NTASKS.
    ("Slurm's srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("PMIx", "PMIX_RANK", ""),
)
# mpirun sets one of these. Our launcher removes them for its ranks, but a rank may itself start mpirun.
_MPIRUN_VARIABLES = ("PMIX_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK")


def find_launcher(environ: Mapping[str, str] = os.environ) -> Launcher | None:
    """Returns the launcher that started this process as a rank, or None."""
    if not any(name in environ for name in _MPIRUN_VARIABLES) and (own := config.get("HOST_RANK", environ)):
        return Launcher("keras-ddl run", *own)
    for name, rank_variable, size_variable in _LAUNCHERS:
        rank, size = _integer(environ, rank_variable), _integer(environ, size_variable)
        if rank is not None and (size is not None or not size_variable):
            return Launcher(name, rank, size)
    return None


def local_place(environ: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """Returns the local rank that the launcher has chosen for a process, and the number of ranks on its host."""
    rank, size = (_integer(environ, f"OMPI_COMM_WORLD_LOCAL_{each}") for each in ("RANK", "SIZE"))
    return rank or 0, size or 1


def allocation_size(environ: Mapping[str, str] = os.environ) -> int | None:
    """Returns the number of tasks of the Slurm allocation around a process without a launcher; None outside of one.

    A number above 1 means that the script was probably meant to run on several ranks.
    """
    if "SLURM_JOB_ID" not in environ and "SLURM_JOBID" not in environ:
        return None
    return _integer(environ, "SLURM_NTASKS")


# IBM's letters for all-reduce algorithms, which ddlrun passes alone or before the dimensions of a mode.
_IBM_LETTERS = "prbnmc"


def chosen_mode() -> str:
    """Returns the mode of the topology: KERAS_DDL_MODE, else the -mode of ddlrun's DDL_OPTIONS, else 'p'.

    The part `ddl` checks DDL_OPTIONS; a script that only imports keras_ddl may run under ddlrun, too.
    """
    if not config.is_set("MODE"):
        words = os.environ.get("DDL_OPTIONS", "").split()
        for flag, value in zip(words, words[1:]):
            if flag in ("-mode", "--mode"):
                return "p" if value in _IBM_LETTERS else value  # a letter alone has no dimensions
    return str(config.get("MODE"))


def host_key() -> str:
    """Returns a string that only processes that can share memory have in common: kernel, host name and IPC space.

    The boot id distinguishes machines of equal names; the IPC namespace distinguishes containers.
    """
    parts = [socket.gethostname()]
    try:
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(str(Path("/proc/self/ns/ipc").readlink()))
    except OSError:
        pass  # without Linux, or with a hardened /proc, use only the host name
    return " ".join(parts)


def _integer(environ: Mapping[str, str], name: str) -> int | None:
    try:
        return int(environ[name])
    except (KeyError, ValueError):
        return None
