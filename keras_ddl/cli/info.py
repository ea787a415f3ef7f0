"""keras-ddl info: shows the installed versions and settings.

Imports neither Keras nor MPI, and TensorFlow only where the host may have GPUs.
"""

from __future__ import annotations

import os
import platform
import shutil
import socket
import sys
from pathlib import Path

import click

import keras_ddl
from keras_ddl import config, packages
from keras_ddl.cli.sizes import size_text
from keras_ddl.errors import DependencyError, KerasDdlError

# Each row lists alternatives; one of them should be installed.
_DISTRIBUTIONS = (
    packages.TENSORFLOWS,
    ("keras",),
    ("numpy",),
    ("mpi4py",),
    packages.MPIS,
    ("cloudpickle",),
)


@click.command("info", short_help="Show versions, MPI, the machine, its GPUs and the settings.")
@click.option("--all", "all_settings", is_flag=True, help="Also show the settings that have their default.")
def command(all_settings: bool) -> None:
    """Show versions, MPI, the machine, its GPUs and the settings that you have changed."""
    sections = [("Software", software()), ("MPI", mpi()), ("Machine", machine()), ("GPUs", gpus())]
    changed = settings(with_defaults=all_settings)
    sections.append(("Settings", changed or [("", "all have their default; keras-ddl info --all lists them")]))
    if handed_over := _variables(are_set_by_keras_ddl=True):  # in a rank
        sections.append(("Set by keras-ddl for this process", handed_over))
    for title, rows in sections:
        click.echo(click.style(title, bold=True))
        width = max(len(name) for name, _ in rows)
        for name, value in rows:
            click.echo(f"  {name:<{width}}  {value}")


def software() -> list[tuple[str, str]]:
    """Returns (name, version) of keras_ddl and the packages that it uses, from their metadata."""
    rows = [
        ("keras_ddl", f"{keras_ddl.__version__} ({Path(keras_ddl.__file__).parent})"),
        ("python", f"{platform.python_version()} ({sys.executable})"),
    ]
    for names in _DISTRIBUTIONS:
        installed = [(name, version) for name in names if (version := packages.version(name))]
        if not installed:
            missing = "not installed"
            if names[0] == "tensorflow":
                missing += f" ({packages.install_tensorflow()})"
            rows.append((names[0], missing))
        rows += installed
        if names[0] == "tensorflow" and len(installed) > 1:
            rows.append(("", "WARNING: these overwrite each other's files; uninstall all, then install one"))
    libraries = sorted(path.name for folder in keras_ddl.__path__ for path in Path(folder).glob("libkeras_ddl*.so"))
    rows.append(("native libraries", ", ".join(libraries) or "none: keras_ddl is not built"))
    return rows


def mpi() -> list[tuple[str, str]]:
    """Returns the mpirun that would start ranks, and the MPI that they would use; both must be of one family."""
    from keras_ddl.launch.mpi import mpirun, native_mpi

    try:
        starter = mpirun.find()
    except KerasDdlError as error:
        return [("native library", _native_text(native_mpi.describe())), ("mpirun", str(error))]
    native = native_mpi.describe(starter.mpi)
    rows = [("native library", _native_text(native)), ("mpirun", starter.path), ("", starter.version)]
    if native.get("family", starter.mpi) != starter.mpi:
        rows.append(("", f"WARNING: mpirun starts ranks of another MPI than {native['family']}"))
    return rows


def _native_text(native: dict[str, str]) -> str:
    return native.get("problem") or f"{native['family']}: {native['version']} ({os.path.normpath(native['path'])})"


def machine() -> list[tuple[str, str]]:
    """Returns the host, its CPU, memory and shared memory."""
    cpus = len(os.sched_getaffinity(0))
    rows = [
        ("host", f"{socket.gethostname()} ({platform.system()} {platform.release()}, {platform.machine()})"),
        ("CPU", f"{cpu_model()}, {cpus} usable"),
        ("memory", size_text(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))),
    ]
    try:
        usage = shutil.disk_usage("/dev/shm")
        rows.append(("/dev/shm", f"{size_text(usage.total)}, {size_text(usage.free)} free"))
    except OSError as error:
        rows.append(("/dev/shm", f"not usable: {error}"))
    return rows


def gpus() -> list[tuple[str, str]]:
    """Returns the GPUs with the rank that uses each, the driver's report, and why TensorFlow cannot use them, if so."""
    from keras_ddl.launch.checks import gpus as gpu_checks

    found = gpu_checks.check_host()
    if found is None and not os.environ.get("TF_PLUGGABLE_DEVICE_LIBRARY_PATH"):
        return [("", "none found")]
    rows = []
    if any(packages.version(name) for name in packages.TENSORFLOWS):
        from keras_ddl.compat.tensorflow_packages import import_without_keras
        from keras_ddl.launch.output import startup_notes

        with startup_notes.hidden():
            import_without_keras()
            names = gpu_checks.names_in_tensorflow()
        rows = [(f"GPU {number}", f"{name}: local rank {number} computes on it") for number, name in enumerate(names)]
        rows.append(("TensorFlow", f"sees {len(names) or 'none'}"))
        if names:
            rows.append(("collectives", _path_of_tensors()))
        found = gpu_checks.check_tensorflow(names)
    if found is not None:
        rows.append(("host", " ".join(filter(None, [f"{found.found}.", found.remedy]))))
    return rows


def _path_of_tensors() -> str:
    from keras_ddl.compat import gpu_stream

    try:
        library = gpu_stream.path()
    except DependencyError as error:
        return f"TensorFlow copies tensors to the host, because {error}"
    return f"take tensors on GPUs (by {library.name}{'' if library.exists() else ', which g++ builds at first use'})"


def settings(*, with_defaults: bool) -> list[tuple[str, str]]:
    """Returns name, value and source of the variables that the user has set, or of all that a user may set."""
    rows = _variables(are_set_by_keras_ddl=False, with_defaults=with_defaults)
    rows += [(name, f"{os.environ[name]} (environment, UNKNOWN to keras_ddl)") for name in config.unknown()]
    if os.environ.get("TF_CONFIG"):
        note = "TensorFlow's; `keras-ddl run --tf-config` starts the cluster it names."
        rows.append(("TF_CONFIG", f"{os.environ['TF_CONFIG']} (environment): {note}"))
    if "DDL_OPTIONS" in os.environ:
        rows.append(("DDL_OPTIONS", f"{os.environ['DDL_OPTIONS']} (environment): IBM's; only its -mode is read."))
    return rows


def _variables(*, are_set_by_keras_ddl: bool, with_defaults: bool = False) -> list[tuple[str, str]]:
    """Returns (name, value with source and meaning) of users' settings, or of variables set by keras_ddl itself."""
    rows = []
    for row in config.VARIABLES.values():
        if row.is_set_by_keras_ddl != are_set_by_keras_ddl or not (with_defaults or config.is_set(row.name)):
            continue
        try:
            value, source = config.get(row.name), "environment" if config.is_set(row.name) else "default"
        except KerasDdlError as error:
            value, source = error, "environment, INVALID"
        rows.append((row.environment_name, f"{value if value is not None else '-'} ({source}): {row.why}"))
    return rows


def cpu_model() -> str:
    """Returns the processor's name, or "unknown"."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"
