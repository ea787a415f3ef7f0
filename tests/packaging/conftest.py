"""Builds the package once, as a user's pip would, for all packaging tests.

sdist -> wheel (in pip's isolated build environment) -> a clean virtual environment without TensorFlow. The other
builds (editable, site MPI) reuse the wheel's build folder, so that only what differs is compiled again.
"""

from __future__ import annotations

import sys
import tarfile
from pathlib import Path

import pytest

from harness.packaging_tools import ROOT, Venv, make_venv, run


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
    """The unpacked sdist: what is built from it needs nothing that was left out of it."""
    with tarfile.open(sdist) as archive:
        # Early releases of Python 3.11 have no filters; the archive is our own.
        archive.extractall(work / "source", **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    (path,) = (work / "source").iterdir()
    return path


@pytest.fixture(scope="session")
def build_setting(work) -> str:
    return f"build-dir={work / 'build'}"


@pytest.fixture(scope="session")
def wheel(source, work, build_setting) -> Path:
    run(
        *(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", work, "-C", build_setting, source),
        cwd=work,
    )
    (path,) = work.glob("*.whl")
    return path


@pytest.fixture(scope="session")
def clean_venv(wheel, work) -> Venv:
    """The wheel with everything it requires, and nothing else."""
    venv = make_venv(work / "clean")
    venv.pip_install(wheel)
    return venv
