"""One Slurm for all tests of this folder, which are skipped if none can be started."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness import slurm as slurm_module
from harness.packaging_tools import RUNTIME, Venv, kept_wheel, make_venv


@pytest.fixture(scope="session")
def slurm() -> Iterator[slurm_module.Slurm]:
    reason = slurm_module.missing()
    if reason is not None:
        pytest.skip(reason)
    with slurm_module.running() as found:
        yield found


@pytest.fixture(scope="session")
def pmix(slurm) -> str:
    done = slurm.run("srun", "--mpi=pmix", "true")
    if done.returncode != 0:
        pytest.skip(f"this Slurm has no PMIx (on Debian it needs libpmix-dev): {done.stdout}")
    return "--mpi=pmix"


@pytest.fixture(scope="session", params=["mpich>=4.2,<6", "impi-rt>=2021.13"])
def pmi2_venv(request, tmp_path_factory) -> Venv:
    """An environment with an MPI that speaks PMI-2."""
    wheel = kept_wheel()
    if wheel is None or "manylinux" not in wheel.name:
        pytest.skip("this environment lacks the wheel of `make wheel`, which supports these MPIs")
    venv = make_venv(tmp_path_factory.mktemp("pmi2") / "venv")
    venv.pip_install(*RUNTIME, request.param)
    venv.pip_install("--no-deps", wheel)
    return venv


@pytest.fixture
def folder(slurm, tmp_path) -> Iterator[Path]:
    """A directory that jobs may write to."""
    path = slurm.folder / tmp_path.name
    path.mkdir()
    yield path
    shutil.rmtree(path)
