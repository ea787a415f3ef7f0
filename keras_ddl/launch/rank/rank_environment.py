"""Builds the environment of a rank's program from the launcher's variables and MPI's."""

from __future__ import annotations

import os
import re
import socket
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from keras_ddl.errors import LaunchError
from keras_ddl.topology import tf_config
from keras_ddl.topology.launcher import find_launcher

# The process manager sets these per rank or per host, so the launcher's own values would be wrong.
_MPI_VARIABLES = re.compile(
    r"(OMPI_|OPAL_|PMIX_|PMI_|PRTE_|MPI_LOCAL|MPIR_|MPICH_|HYDI?_|HYDRA_|I_MPI_|SLURM_|UCX_|FI_)"
)
_HOST_VARIABLES = re.compile(
    r"(HOSTNAME|HOST|PWD|OLDPWD|SHLVL|SHELL|HOME|USER|LOGNAME|MAIL|TMPDIR|TMP|TEMP|DISPLAY|SSH_.*|XDG_.*|DBUS_.*|_|KERAS_DDL_RACK)$"
)
_PATHS = ("PATH", "LD_LIBRARY_PATH")
_NO_MPI = "this rank was started without MPI; use keras-ddl run --mpirun mpirun"
_HUGE_PAGES, _ARENAS = "glibc.malloc.hugetlb", "glibc.malloc.arena_max"
_THREADS_PER_ARENA = 4  # cores per rank up to which one malloc arena is enough
# Variables for the wrapper itself, not for the program.
_WRAPPER_VARIABLES = ("KERAS_DDL_LAUNCHER", "KERAS_DDL_JOB_ID", "PYTHONPATH", "PRTE_MCA_prte_local_tmpdir_base")


def rank_and_size(environ: Mapping[str, str]) -> tuple[int, int]:
    """Returns the rank and size that mpirun set for this process. Raises: LaunchError: the variables are missing."""
    started_by = find_launcher(environ)
    if started_by is None or started_by.rank is None or started_by.size is None:
        raise LaunchError(
            "A rank's process must be started by mpirun, which sets its rank in the environment. Received: "
            f"no such variable, on host {socket.gethostname()}. Start the program with `keras-ddl run`."
        )
    return started_by.rank, started_by.size


def merge(own: Mapping[str, str], wanted: Mapping[str, str], *, same_host: bool) -> dict[str, str]:
    """Returns the environment for the program of a rank.

    Args:
        own: the wrapper's environment, made by mpirun (and by the login on another host).
        wanted: the environment of `keras-ddl run`, with the variables of --env.
    """
    result = {name: value for name, value in own.items() if name not in _WRAPPER_VARIABLES}
    for name, value in wanted.items():
        if name in own and _MPI_VARIABLES.match(name):
            continue
        if not same_host and _HOST_VARIABLES.match(name):
            continue
        if name in _PATHS and name in own:
            # mpirun puts its own libraries in front; keep them there.
            value = os.pathsep.join(dict.fromkeys(own[name].split(os.pathsep) + value.split(os.pathsep)))
        result[name] = value
    return result


def tune_malloc(environment: dict[str, str], ranks: int) -> None:
    """Sets GLIBC_TUNABLES so that glibc keeps a step's memory, in huge pages, for the next step. Keeps set tunables.

    TensorFlow's tensors come from malloc, and new pages cost a training step much time
    (benchmarks/results/training_step.md). Huge pages (glibc 2.35 and later) are only a request, which a kernel without
    them ignores. Arenas of threads other than the first return free memory to the system at once; a single arena for
    all threads does not. Many threads would contend for a single arena, so with many threads each keeps its own.

    Args:
        ranks: number of ranks on this host, which share its cores.
    """
    tunables = environment.get("GLIBC_TUNABLES", "")
    wanted = {_HUGE_PAGES: 1}
    if len(os.sched_getaffinity(0)) <= _THREADS_PER_ARENA * ranks:
        wanted[_ARENAS] = 1
    added = [f"{name}={value}" for name, value in wanted.items() if name not in tunables]
    if added:
        environment["GLIBC_TUNABLES"] = ":".join(filter(None, (tunables, *added)))


def set_task(environment: dict[str, str], rank: int, size: int) -> None:
    """Sets this rank's task in TF_CONFIG.

    Removes a TF_CONFIG without one task per rank, in which all ranks would be the same task.
    """
    text = tf_config.of_rank(environment.pop(tf_config.NAME, ""), rank, size)
    if text:
        environment[tf_config.NAME] = text


def without_mpi(environment: dict[str, str], rank: int, size: int) -> None:
    """Sets the variables of Open MPI's mpirun for a rank started without it, and makes MPI fail to start there.

    Otherwise each rank would be alone in a separate MPI job. mpi4py's error shows the name of the missing library,
    which says what to do. MPICH has no such setting. host_ranks.py sets the variables of the rank on its host.
    """
    for name, value in (("RANK", rank), ("SIZE", size)):
        environment[f"OMPI_COMM_WORLD_{name}"] = str(value)
    environment["MPI4PY_LIBMPI"] = f"/{_NO_MPI}"
    environment["MPI4PY_RC_INITIALIZE"] = "false"  # for an mpi4py that is linked to its library
    environment["OMPI_MCA_pml"] = re.sub(r"\W+", "-", _NO_MPI)


def prepare_start(environment: dict[str, str], *, is_spare: bool) -> None:
    """Makes a rank's Python import large packages faster (rank_start).

    A spare's Python imports them early, and then waits until it is needed (spare_start).
    """
    here = Path(__file__).parent
    paths = [str(here / "spare_start")] if is_spare else []
    paths += [str(here / "rank_start"), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))


def python_path() -> str:
    """Returns the PYTHONPATH that lets another python import this keras_ddl; "" if none is needed."""
    # Without site-packages, whose backports would precede the standard library in PYTHONPATH.
    here = str(Path(__file__).resolve().parents[3])
    installed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    paths = [] if here in installed else [here]
    paths += [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return os.pathsep.join(dict.fromkeys(paths))
