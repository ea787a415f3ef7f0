"""The wheel of `make wheel`, which works with Open MPI, MPICH and Intel MPI on machines without a compiler."""

import importlib.util
import re
import sys
import zipfile
from pathlib import Path

import pytest

from harness.packaging_tools import HELLO, ROOT, make_venv, run

pytestmark = pytest.mark.packaging
TOOL = ROOT / "tools" / "wheel.py"


def test_portable_wheel_is_tagged_and_bundles_nothing(portable_wheel):
    with zipfile.ZipFile(portable_wheel) as archive:
        names = archive.namelist()
    assert re.search(r"-py3-none-manylinux_2_\d+_(x86_64|aarch64)\.whl$", portable_wheel.name)
    libraries = {Path(name).name for name in names if ".so" in name}
    shims = {"libkeras_ddl_mpi_openmpi.so", "libkeras_ddl_mpi_mpich.so"}
    assert libraries == {"libkeras_ddl.so", "libkeras_ddl_cuda.so", "libkeras_ddl_tf.so"} | shims
    assert any(name.endswith(".dist-info/licenses/LICENSES.md") for name in names)


OPEN_MPI, MPICH = "openmpi>=5,<6", "mpich>=4.2,<6"


@pytest.mark.long  # test_wheel.py runs two ranks on Open MPI
@pytest.mark.parametrize(
    ("mpi", "family", "library"),
    [
        (OPEN_MPI, "Open MPI", "libmpi.so.40"),
        (MPICH, "MPICH", "libmpi.so.12"),
        ("impi-rt>=2021.13", "Intel(R) MPI", "libmpi.so.12"),
    ],
)
def test_portable_wheel_runs_on_the_mpi_beside_it(mpi, family, library, mpi_venv, tmp_path):
    venv = mpi_venv(mpi)
    command = venv.path / "bin" / "keras-ddl"
    only_here = str(venv.path / "bin")  # no g++, and no other mpirun
    run(command, "run", "-np", "2", "python", "-c", HELLO, tmp_path, cwd=tmp_path, timeout=300, PATH=only_here)
    for rank in range(2):
        _, path, description = (tmp_path / str(rank)).read_text().splitlines()
        assert Path(path).resolve().is_relative_to(venv.path.resolve())
        assert Path(path).name == library
        assert "2 rank(s) in shared memory" in description
    info = run(command, "info", cwd=tmp_path, PATH=only_here)
    assert re.search(rf"native library +\S.*{re.escape(family)}", info)
    assert "WARNING: mpirun" not in info


@pytest.mark.long
def test_portable_wheel_uses_the_launchers_mpi_if_two_are_found(mpi_venv, tmp_path):
    venv, site = mpi_venv(OPEN_MPI), mpi_venv(MPICH)
    found = {"LD_LIBRARY_PATH": str(site.path / "lib")}  # as set by the module of a site's MPI
    for launcher, library in (
        (venv.path / "bin" / "mpirun", "libmpi.so.40"),
        (site.path / "bin" / "mpiexec", "libmpi.so.12"),
    ):
        for _, mpi, _ in venv.run_two_ranks(launcher, tmp_path / launcher.name, **found):
            assert Path(mpi).name == library
    first = "from mpi4py import MPI\n"  # mpi4py then chooses
    chosen = {"MPI4PY_LIBMPI": str(site.path / "lib" / "libmpi.so.12")}
    (tmp_path / "first").mkdir()
    launch = (site.path / "bin" / "mpiexec", "-n", "2", venv.python, "-c", first + HELLO, tmp_path / "first")
    run(*launch, cwd=tmp_path, timeout=300, **chosen)
    assert Path((tmp_path / "first" / "0").read_text().splitlines()[1]) == Path(chosen["MPI4PY_LIBMPI"])
    shown = venv.run_and_fail(site.path / "bin" / "mpiexec", "-n", "2", venv.python, "-c", HELLO, tmp_path)
    assert "MPICH or Intel MPI started 2 processes" in shown
    assert "so that its libmpi is found (LD_LIBRARY_PATH)" in shown


def test_portable_wheel_without_an_mpi_names_the_remedy(portable_wheel, work, tmp_path):
    venv = make_venv(work / "no-mpi")
    venv.pip_install("--no-deps", portable_wheel)
    code = "from keras_ddl.communicator.native import native_library as n; print(n.mpi_families()); n.mpi_shim()"
    shown = venv.run_and_fail(venv.python, "-c", code, PATH=str(venv.path / "bin"))
    if "Received: libmpi.so.40: cannot open" not in shown:
        pytest.skip("this machine has a system-wide MPI")
    assert "('Open MPI', 'MPICH')" in shown
    assert "libmpi.so.12: cannot open" in shown
    assert "install 'openmpi>=5,<6'" in shown


def test_kept_wheel_of_the_same_sources_needs_no_compiler(tmp_path):
    specification = importlib.util.spec_from_file_location("tools_wheel", TOOL)
    tool = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(tool)
    (tmp_path / "keras_ddl-0-py3-none-any.whl").touch()
    (tmp_path / tool.DIGEST).write_text(tool._digest())
    nothing = str(tmp_path / "nowhere")
    assert "is of these sources" in run(sys.executable, TOOL, tmp_path, cwd=tmp_path, PATH=nothing)
    (tmp_path / tool.DIGEST).write_text("of other sources")
    with pytest.raises(AssertionError, match=r"C\+\+17 compiler. Received: g\+\+, which is not there"):
        run(sys.executable, TOOL, tmp_path, cwd=tmp_path, PATH=nothing, CXX="g++")
    assert (tmp_path / "keras_ddl-0-py3-none-any.whl").exists()
