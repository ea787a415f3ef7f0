"""What the launcher's environment variables say, before MPI is initialised. Afterwards only the communicator counts."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Launcher:
    """A launcher that started this process; `rank` and `size` are None where it does not tell them."""

    name: str
    rank: int | None
    size: int | None


# Open MPI comes first: its mpirun inside a Slurm allocation sets both kinds. PMIX_RANK comes last: Open MPI and Slurm
# set it as well, and it does not tell the size.
_VARIABLES = (
    ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("MPICH or Intel MPI", "PMI_RANK", "PMI_SIZE"),
    ("MVAPICH", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    # srun's tasks only: the shell of salloc and the script of sbatch have SLURM_NTASKS, but no step.
    ("Slurm's srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("PMIx", "PMIX_RANK", ""),
)


def launcher(environ: Mapping[str, str] | None = None) -> Launcher | None:
    """Returns the launcher that started this process as a rank; None when it was started alone."""
    environ = os.environ if environ is None else environ
    for name, rank_variable, size_variable in _VARIABLES:
        rank = _integer(environ, rank_variable)
        if rank is None:
            continue
        size = _integer(environ, size_variable)
        if size is None and size_variable:
            continue
        return Launcher(name, rank, size)
    return None


def allocation_size(environ: Mapping[str, str] | None = None) -> int | None:
    """Returns the tasks of the Slurm allocation around a process that no launcher started; None outside of one.

    More than 1 means that the script was probably meant to run on several ranks.
    """
    environ = os.environ if environ is None else environ
    if "SLURM_JOB_ID" not in environ and "SLURM_JOBID" not in environ:
        return None
    return _integer(environ, "SLURM_NTASKS")


def host_key() -> str:
    """Returns a text that is equal exactly for processes that can share memory: one kernel, host name and IPC space.

    The boot id separates machines that were given one name; the IPC namespace separates containers.
    """
    parts = [socket.gethostname()]
    try:
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(str(Path("/proc/self/ns/ipc").readlink()))
    except OSError:
        pass  # not Linux, or a hardened /proc: the host name has to do
    return " ".join(parts)


def _integer(environ: Mapping[str, str], name: str) -> int | None:
    try:
        return int(environ[name])
    except (KeyError, ValueError):
        return None
