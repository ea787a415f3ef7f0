"""The environment of a rank: which rank it is, the launcher's variables beside MPI's, and PYTHONPATH."""

from __future__ import annotations

import os
import re
import socket
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from keras_ddl.config import launcher
from keras_ddl.errors import LaunchError
from keras_ddl.topology import tf_config

# Set for each rank, or for each host, by the process manager: the launcher's own values would be wrong.
_OF_MPI = re.compile(r"(OMPI_|OPAL_|PMIX_|PMI_|PRTE_|MPI_LOCAL|MPIR_|MPICH_|HYDI?_|HYDRA_|I_MPI_|SLURM_|UCX_|FI_)")
_OF_THE_HOST = re.compile(
    r"(HOSTNAME|HOST|PWD|OLDPWD|SHLVL|SHELL|HOME|USER|LOGNAME|MAIL|TMPDIR|TMP|TEMP|DISPLAY|SSH_.*|XDG_.*|DBUS_.*|_|KERAS_DDL_RACK)$"
)
_PATHS = ("PATH", "LD_LIBRARY_PATH")
_NO_MPI = "this rank was started without MPI; use keras-ddl run --mpirun mpirun"
_HUGE_PAGES, _ARENAS = "glibc.malloc.hugetlb", "glibc.malloc.arena_max"
_THREADS_OF_AN_ARENA = 4  # as many cores of a rank
# Those of the wrapper itself, not of the program.
_OF_THE_WRAPPER = ("KERAS_DDL_LAUNCHER", "PYTHONPATH", "PRTE_MCA_prte_local_tmpdir_base")


def rank_and_size(environ: Mapping[str, str]) -> tuple[int, int]:
    """Returns the rank and size that mpirun gave to this process. Raises: LaunchError: it gave none."""
    found = launcher(environ)
    if found is None or found.rank is None or found.size is None:
        raise LaunchError(
            "A rank's process must be started by mpirun, which sets its rank in the environment. Received: "
            f"no such variable, on host {socket.gethostname()}. Start the program with `keras-ddl run`."
        )
    return found.rank, found.size


def merge(own: Mapping[str, str], wanted: Mapping[str, str], *, same_host: bool) -> dict[str, str]:
    """Returns the environment for the program of a rank.

    Args:
        own: that of the wrapper, made by mpirun (and by a login on another host).
        wanted: that of the command line of `keras-ddl run`, with what --env adds.
    """
    result = {name: value for name, value in own.items() if name not in _OF_THE_WRAPPER}
    for name, value in wanted.items():
        if name in own and _OF_MPI.match(name):
            continue
        if not same_host and _OF_THE_HOST.match(name):
            continue
        if name in _PATHS and name in own:
            # mpirun puts its own libraries in front; keep them there.
            value = os.pathsep.join(dict.fromkeys(own[name].split(os.pathsep) + value.split(os.pathsep)))
        result[name] = value
    return result


def tune_malloc(environment: dict[str, str], ranks: int) -> None:
    """Has glibc keep the memory of a step for the next, in huge pages, unless GLIBC_TUNABLES already says how.

    TensorFlow's tensors come from malloc, and new pages cost a training step more than their number suggests
    (docs/appendix/performance.md). Huge pages (glibc 2.35 and later) are only a request: a kernel without them ignores
    it. What malloc has for threads other than the first goes back to the system whenever it is free; with one arena
    for all threads it stays. Many threads would wait for each other there: they keep theirs.

    Args:
        ranks: of this host, which share its cores.
    """
    tunables = environment.get("GLIBC_TUNABLES", "")
    wanted = {_HUGE_PAGES: 1}
    if len(os.sched_getaffinity(0)) <= _THREADS_OF_AN_ARENA * ranks:
        wanted[_ARENAS] = 1
    ours = [f"{name}={value}" for name, value in wanted.items() if name not in tunables]
    if ours:
        environment["GLIBC_TUNABLES"] = ":".join(filter(None, (tunables, *ours)))


def give_task(environment: dict[str, str], rank: int, size: int) -> None:
    """Makes TF_CONFIG name this rank's task, for programs that look there who they are; without tasks for all ranks it
    is taken away, because it would tell all of them that they are the same.
    """
    text = tf_config.of_rank(environment.pop(tf_config.NAME, ""), rank, size)
    if text:
        environment[tf_config.NAME] = text


def without_mpi(environment: dict[str, str], rank: int, size: int) -> None:
    """Tells the program of a rank that no mpirun has started who it is, as Open MPI's mpirun would; and makes MPI fail
    to start there: each of several ranks would take itself for the only one, and one leave Open MPI's files behind.

    mpi4py shows the name of the library that it does not find. MPICH has no such setting.
    """
    for name, value in (("RANK", rank), ("SIZE", size), ("LOCAL_RANK", rank), ("LOCAL_SIZE", size)):
        environment[f"OMPI_COMM_WORLD_{name}"] = str(value)
    environment["MPI4PY_LIBMPI"] = f"/{_NO_MPI}"
    environment["MPI4PY_RC_INITIALIZE"] = "false"  # for an mpi4py that is linked to its library
    environment["OMPI_MCA_pml"] = re.sub(r"\W+", "-", _NO_MPI)


def python_path() -> str:
    """Returns the PYTHONPATH with which another python finds this keras_ddl; "" when none is needed."""
    # Not site-packages: in PYTHONPATH its backports would come before the standard library.
    here = str(Path(__file__).resolve().parents[2])
    installed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    paths = [] if here in installed else [here]
    paths += [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return os.pathsep.join(dict.fromkeys(paths))
