"""Checks one host without starting ranks: software, CPU, GPUs, memory, shared memory, settings."""

from __future__ import annotations

import os
import platform
import resource
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath

from keras_ddl import config, packages
from keras_ddl.doctor import checkpoint_directory
from keras_ddl.errors import KerasDdlError
from keras_ddl.launch.checks import gpus
from keras_ddl.launch.checks.finding import Finding, Severity

# On CPUs with one of these TensorFlow switches oneDNN on by default (tsl/util/onednn_util).
_FOR_ONEDNN = {"avx512_vnni", "avx512_bf16", "amx_tile", "amx_int8", "amx_bf16", "avx_vnni"}
_GIB = 1 << 30
# A communicator's staging memory (KERAS_DDL_STAGING_BYTES) is at most 64 MiB per host, and MPI also needs some.
_ENOUGH_SHM = 256 << 20
_ENOUGH_FILES = 1024


def check(
    directory: str | Path = ".", environ: Mapping[str, str] = os.environ, root: Path = Path("/")
) -> list[Finding]:
    """Returns the findings about this host.

    Args:
        directory: where checkpoints will be.
        environ: the environment of ranks.
        root: parent of /proc and /sys, for tests.
    """
    checks: tuple[Callable[[], Iterator[Finding]], ...] = (
        _software,
        _mpi,
        lambda: _cpu(environ, root),
        lambda: _gpus(environ, root),
        lambda: _memory(root),
        lambda: _shared_memory(root),
        lambda: _huge_pages(environ, root),
        lambda: _limits(),
        lambda: _variables(environ),
        lambda: checkpoint_directory.check(Path(directory), root),
    )
    return [finding for one in checks for finding in one()]


def _software() -> Iterator[Finding]:
    installed = [f"{name} {version}" for name in packages.TENSORFLOWS if (version := packages.version(name))]
    if not installed:
        yield Finding(Severity.ERROR, "TensorFlow", "not installed", packages.install_tensorflow())
    elif len(installed) > 1:
        remedy = f"They overwrite each other's files: {packages.install_tensorflow()}"
        yield Finding(Severity.ERROR, "TensorFlow", ", ".join(installed), remedy)
    else:
        yield Finding(Severity.OK, "TensorFlow", installed[0])
    keras = packages.version("keras")
    remedy = "" if keras else packages.pip_install("keras")
    yield Finding(Severity.OK if keras else Severity.ERROR, "Keras", keras or "not installed", remedy)


def _mpi() -> Iterator[Finding]:
    from keras_ddl.launch.mpi import mpirun, native_mpi

    try:
        launcher = mpirun.find()
    except KerasDdlError as error:
        yield Finding(
            Severity.WARNING, "mpirun", f"none, and jobs on several hosts need one, except with -np MIN:MAX: {error}"
        )
        return
    native = native_mpi.describe(launcher.mpi)
    if "problem" in native:
        yield Finding(Severity.ERROR, "MPI", native["problem"], "See docs/install.md, 'MPI'.")
        return
    description = f"{native['family']} {native['version']}, started by {launcher.path}"
    if native["family"] != launcher.mpi:
        remedy = "Name the mpirun of the same MPI with --mpirun or KERAS_DDL_MPIRUN."
        yield Finding(Severity.ERROR, "MPI", description + f" ({launcher.version})", remedy)
    else:
        yield Finding(Severity.OK, "MPI", description)


def _cpu(environ: Mapping[str, str], root: Path) -> Iterator[Finding]:
    usable = len(os.sched_getaffinity(0))
    quota = cpu_limit(root)
    if quota is not None and quota < usable:
        remedy = f"Start at most {max(1, int(quota))} rank(s) here, or give the container more CPUs."
        limit = f"{usable} cores, but a control group limits CPU time to {quota:g}"
        yield Finding(Severity.WARNING, "CPU", limit, remedy)
    else:
        yield Finding(Severity.OK, "CPU", f"{usable} usable core(s)")
    flags = _cpu_flags(root)
    if platform.machine() == "x86_64" and flags and environ.get("TF_ENABLE_ONEDNN_OPTS", "") == "":
        if not flags & _FOR_ONEDNN:
            remedy = (
                "Try TF_ENABLE_ONEDNN_OPTS=1 (`keras-ddl run --env TF_ENABLE_ONEDNN_OPTS=1`): where measured, steps "
                "took a third to a half of the time that they take without it. Results differ in the last digits."
            )
            yield Finding(Severity.WARNING, "oneDNN", "TensorFlow leaves it off on this CPU", remedy)
    elif environ.get("TF_ENABLE_ONEDNN_OPTS") == "0":
        remedy = "Unset TF_ENABLE_ONEDNN_OPTS, unless you need the exact results of TensorFlow's own kernels."
        yield Finding(Severity.WARNING, "oneDNN", "switched off by TF_ENABLE_ONEDNN_OPTS=0", remedy)


def _gpus(environ: Mapping[str, str], root: Path) -> Iterator[Finding]:
    found = gpus.check_host(environ, root)
    if found is not None:
        yield found


def _memory(root: Path) -> Iterator[Finding]:
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = memory_limit(root)
    allowed = physical if limit is None else min(limit, physical)
    size = f"{allowed / _GIB:.1f} GiB" + (" (limit of a control group)" if allowed < physical else "")
    if allowed < 2 * _GIB:
        remedy = "A rank that only imports TensorFlow and Keras takes about 0.6 GiB. Give the container more memory."
        yield Finding(Severity.WARNING, "memory", size, remedy)
    else:
        yield Finding(Severity.OK, "memory", size)


def _shared_memory(root: Path) -> Iterator[Finding]:
    try:
        free = shutil.disk_usage(root / "dev/shm").free
    except OSError as error:
        remedy = "Ranks of a host exchange data through it: mount a tmpfs there."
        yield Finding(Severity.ERROR, "/dev/shm", f"not usable: {error.strerror}", remedy)
        return
    size = f"{free / _GIB:.2f} GiB free"
    if free < _ENOUGH_SHM:
        remedy = "Give containers more (docker run --shm-size=1g; in Kubernetes an emptyDir with medium: Memory)."
        yield Finding(Severity.WARNING, "/dev/shm", size, remedy)
    else:
        yield Finding(Severity.OK, "/dev/shm", size)


def _huge_pages(environ: Mapping[str, str], root: Path) -> Iterator[Finding]:
    text = _text(root / "sys/kernel/mm/transparent_hugepage/enabled")
    if "[never]" in text:
        remedy = "As root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled. Steps got up to a tenth shorter."
        yield Finding(Severity.NOTE, "huge pages", "off in the kernel", remedy)
    if "glibc.malloc.hugetlb=0" in environ.get("GLIBC_TUNABLES", ""):
        yield Finding(Severity.NOTE, "huge pages", "switched off by GLIBC_TUNABLES")
    preloaded = environ.get("LD_PRELOAD", "")
    if any(name in preloaded for name in ("jemalloc", "tcmalloc", "mimalloc")):
        remedy = "It replaces glibc's malloc, for which keras-ddl run enables huge pages. Measure with and without it."
        yield Finding(Severity.NOTE, "malloc", f"LD_PRELOAD={preloaded}", remedy)


def _limits() -> Iterator[Finding]:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files != resource.RLIM_INFINITY and files < _ENOUGH_FILES:
        remedy = f"Raise it to {_ENOUGH_FILES} or more (ulimit -n), for datasets of many files and connections."
        yield Finding(Severity.WARNING, "open files", f"at most {files} per process", remedy)
    memory = resource.getrlimit(resource.RLIMIT_AS)[0]
    if memory != resource.RLIM_INFINITY:
        remedy = "TensorFlow reserves far more addresses than it uses. Remove the limit (ulimit -v unlimited)."
        yield Finding(Severity.WARNING, "address space", f"limited to {memory / _GIB:.1f} GiB (ulimit -v)", remedy)


def _variables(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yields findings about environment variables that slow jobs down or break them."""
    if environ.get("PYTHONDONTWRITEBYTECODE"):
        remedy = "Unset it: from the second start on, a rank then takes 3 s of a core to start instead of 8."
        effect = "set: every rank compiles TensorFlow's modules at every start"
        yield Finding(Severity.WARNING, "PYTHONDONTWRITEBYTECODE", effect, remedy)
    backend = environ.get("KERAS_BACKEND", "tensorflow")
    if backend != "tensorflow":
        remedy = "keras_ddl works on Keras's TensorFlow backend only: unset it."
        yield Finding(Severity.ERROR, "KERAS_BACKEND", backend, remedy)
    if environ.get("TF_USE_LEGACY_KERAS", "0").lower() not in ("", "0", "false"):
        remedy = "keras_ddl trains models of Keras 3 only: unset it."
        yield Finding(Severity.ERROR, "TF_USE_LEGACY_KERAS", environ["TF_USE_LEGACY_KERAS"], remedy)
    if "--tf_xla_auto_jit" in environ.get("TF_XLA_FLAGS", ""):
        remedy = "XLA cannot compile a step with collectives: unset it."
        yield Finding(Severity.WARNING, "TF_XLA_FLAGS", environ["TF_XLA_FLAGS"], remedy)
    for name in ("OMPI_MCA_hwloc_base_binding_policy", "PRTE_MCA_hwloc_default_binding_policy", "I_MPI_PIN"):
        if environ.get(name, "none").lower() not in ("none", "0", "off", "no"):
            remedy = "It may bind a rank's threads to one core: unset it, or use `keras-ddl run`, which does not bind."
            yield Finding(Severity.WARNING, name, environ[name], remedy)
    for row in config.VARIABLES.values():
        try:
            config.get(row.name)
        except KerasDdlError as error:
            yield Finding(Severity.ERROR, row.environment_name, str(error))
    for name in config.unknown():
        remedy = "`keras-ddl info --all` lists all variables of keras_ddl. Correct or unset it."
        yield Finding(Severity.ERROR, name, "not a variable of keras_ddl", remedy)


def _cpu_flags(root: Path) -> set[str]:
    for line in _text(root / "proc/cpuinfo").splitlines():
        if line.startswith("flags"):
            return set(line.partition(":")[2].split())
    return set()


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


_HOME = "sys/fs/cgroup"


def cpu_limit(root: Path) -> float | None:
    """Returns the CPU limit of the control groups in cores; None: no limit, or unknown."""
    limits = []
    for group in _groups(root, ""):
        limits.append(_quotient(_text(group / "cpu.max").split()))
    for group in _groups(root, "cpu"):
        limits.append(_quotient([_text(group / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]))
    return min((each for each in limits if each is not None), default=None)


def memory_limit(root: Path) -> int | None:
    """Returns the memory limit of the control groups in bytes; None: no limit, or unknown."""
    texts = [_text(group / "memory.max").strip() for group in _groups(root, "")]
    texts += [_text(group / "memory.limit_in_bytes").strip() for group in _groups(root, "memory")]
    # Version 1 writes "no limit" as the size of the address space.
    numbers = [int(text) for text in texts if text.isdigit() and int(text) < 1 << 60]
    return min(numbers, default=None)


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Yields the directories of this process's group of a controller ("": version 2), and of its parents."""
    path = PurePosixPath("/")
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, where = rest.partition(":")
        if controller in controllers.split(","):
            path = PurePosixPath(where)
    homes = [_HOME, f"{_HOME}/unified"] if not controller else [f"{_HOME}/{controller}"]
    for home in homes:
        for group in (path, *path.parents):
            # In a container this may be the host's path, of which only the top exists here.
            yield root / home / str(group).lstrip("/")


def _quotient(words: list[str]) -> float | None:
    if len(words) != 2 or not all(word.isdigit() for word in words) or int(words[1]) == 0:
        return None
    return int(words[0]) / int(words[1])
