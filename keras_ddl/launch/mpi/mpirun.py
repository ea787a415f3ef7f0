"""Finds an mpirun and writes its command line: Open MPI (4, 5) or Hydra (MPICH, Intel MPI)."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from keras_ddl import config, packages
from keras_ddl.errors import LaunchError
from keras_ddl.launch.hosts import Host
from keras_ddl.launch.mpi import native_mpi

OPEN_MPI = "Open MPI"
HYDRA = "Hydra"

# Variables that a launcher or an outer MPI job sets for its own ranks. A job started inside must not see them.
_OUTER_JOB = re.compile(
    r"(OMPI_COMM_WORLD_|OMPI_(ARGV|COMMAND|FILE_LOCATION|APP_CTX|UNIVERSE|WORLD|NUM_APP)|PMIX_|PMI_|PRTE_LAUNCHED|HYDI?_"
    r"|MPI_LOCAL|KERAS_DDL_(RESTART|JOB_DIR|RANK_PROCESS|HOST_RANK)$)"
)
# For a job on one host: otherwise Open MPI's ranks listen on all interfaces, although no other host needs to connect.
ONE_HOST = {"OMPI_MCA_btl": "^tcp"}
# The home of Debian's user nobody. Open MPI and Python load code from HOME, and other users cannot write to this one.
_NO_HOME = "/nonexistent"
ALLOCATIONS = ("SLURM_JOB_NODELIST", "SLURM_NODELIST", "PBS_NODEFILE", "LSB_HOSTS", "LSB_DJOB_HOSTFILE", "PE_HOSTFILE")


@dataclass(frozen=True)
class Mpirun:
    """An mpirun: its path, its family (`OPEN_MPI` or `HYDRA`) and the first line of its version."""

    path: str
    family: str
    version: str

    @property
    def mpi(self) -> str:
        """The MPI family whose ranks it starts: "Open MPI" or "MPICH" (also for Intel MPI)."""
        return "Open MPI" if self.family == OPEN_MPI else "MPICH"


def find(path: str | None = None) -> Mpirun:
    """Returns the mpirun to use: `path` (or the program of this name), else KERAS_DDL_MPIRUN, else the first found.

    It looks for the mpirun of the site's MPI for which keras_ddl was built, then beside python, then in PATH.

    Raises: LaunchError: there is no mpirun, or it is of an unknown family.
    """
    chosen = path or config.get("MPIRUN")
    if chosen:
        origin = "--mpirun" if path else "KERAS_DDL_MPIRUN"
        # A name without a folder is looked up in the same places as the default.
        folders = _folders() if os.sep not in chosen else (None,)
        executable = next(filter(None, (shutil.which(chosen, path=folder) for folder in folders)), None)
        if executable is None:
            raise LaunchError(
                f"{origin} must be the path of an mpirun that can be executed. Received: {chosen!r}. "
                "Leave it out to use the one installed with keras_ddl."
            )
        return identify(executable)
    site = native_mpi.describe().get("site_launcher")
    if site and os.access(site, os.X_OK):
        return identify(site)
    for folder in _folders():
        for name in ("mpirun", "mpiexec"):
            executable = shutil.which(name, path=folder)
            if executable is not None:
                return identify(executable)
    raise LaunchError(
        "Ranks are started by mpirun, except on one host and with -np MIN:MAX. Received: no mpirun next to "
        f"{sys.executable} or in PATH. Load your site's MPI module, give the path of one with --mpirun or "
        f"KERAS_DDL_MPIRUN, or install one: {packages.install_mpi()}"
    )


def _folders() -> tuple[str, ...]:
    return str(Path(sys.executable).parent), sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)


def identify(path: str) -> Mpirun:
    """Runs `path` --version to find its family. Raises: LaunchError: it is not an mpirun that keras_ddl knows."""
    try:
        done = subprocess.run(
            [path, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=20,
            env=environment(os.environ),
        )
        output = done.stdout + done.stderr
    except (OSError, subprocess.TimeoutExpired) as error:
        output = str(error)
    first = output.strip().splitlines()[0] if output.strip() else "nothing"
    if "Open MPI" in output or "OpenRTE" in output:
        return Mpirun(path, OPEN_MPI, first)
    if "HYDRA" in output or "Intel(R) MPI" in output:
        version = re.search(r"Version:\s*(\S+)", output)
        return Mpirun(path, HYDRA, f"Hydra {version.group(1)}" if version else first)
    raise LaunchError(
        f"mpirun must be that of Open MPI, MPICH or Intel MPI. Received: {path}, which answers --version with "
        f"{first!r}. Choose another one with --mpirun or KERAS_DDL_MPIRUN."
    )


def environment(base: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment for mpirun: `base` without the variables of an outer MPI job; root may use it."""
    result = {name: value for name, value in base.items() if not _OUTER_JOB.match(name)}
    if os.geteuid() == 0:
        # In a container the user is root, which Open MPI refuses unless both are set.
        result["OMPI_ALLOW_RUN_AS_ROOT"] = result["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
    result.setdefault("I_MPI_PIN", "0")  # Intel MPI binds by default
    if not result.get("HOME"):
        # Open MPI does not start without HOME, which cron, env -i and some containers do not set.
        try:
            result["HOME"] = str(Path.home())
        except RuntimeError:  # a user without an entry
            result["HOME"] = _NO_HOME
    return result


def in_allocation(base: Mapping[str, str]) -> bool:
    """Whether a resource manager tells mpirun which hosts to use, so that ranks may run on other hosts."""
    return any(name in base for name in ALLOCATIONS)


def command(
    mpirun: Mpirun,
    program: Sequence[str],
    *,
    num_ranks: int,
    hosts: Sequence[Host] = (),
    forward: Sequence[str] = (),
    extra: Sequence[str] = (),
    allocation: bool = False,
) -> list[str]:
    """Returns the command line that starts `program` on `num_ranks` ranks.

    Args:
        forward: environment variables that every host gets.
        extra: further arguments for mpirun, before the program.
        allocation: whether a resource manager chooses the hosts (and knows their slots).
    """
    if mpirun.family == OPEN_MPI:
        line = [mpirun.path, "-np", str(num_ranks)]
        # With bound ranks, TensorFlow's thread pools would have one core each. By slot: consecutive ranks share a host.
        line += ["--bind-to", "none", "--map-by", "slot"]
        if hosts:
            line += ["--host", ",".join(f"{host.name}:{host.slots}" for host in hosts)]
        elif not allocation and num_ranks > _local_slots():
            line += ["--oversubscribe"]
        for name in forward:
            line += ["-x", name]
    else:
        line = [mpirun.path, "-n", str(num_ranks)]  # MPICH does not bind unless asked to
        if hosts:
            line += ["-hosts", ",".join(f"{host.name}:{host.slots}" for host in hosts)]
        if forward:
            line += ["-genvlist", ",".join(forward)]
    return [*line, *extra, *program]


def _local_slots() -> int:
    """Returns how many ranks Open MPI starts here without --oversubscribe: the usable cores (not hardware threads)."""
    cores = set()
    for cpu in os.sched_getaffinity(0):
        try:
            cores.add(Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text())
        except OSError:
            cores.add(str(cpu))
    return len(cores)
