"""Reports about a host's GPUs, with a fake driver library that the tests compile; tests/device tests TensorFlow's."""

import subprocess

import pytest

from keras_ddl import packages
from keras_ddl.launch.checks import gpus
from keras_ddl.launch.checks.finding import Severity
from keras_ddl.packages import nvidia_driver

DRIVER = """
#include <cstring>
extern "C" {
int cuInit(unsigned) { return FAILS; }
int cuDeviceGetCount(int* count) { *count = 2; return 0; }
int cuDriverGetVersion(int* version) { *version = 12080; return 0; }
int cuDeviceGet(int* device, int index) { *device = 7 + index; return 0; }
int cuDeviceGetName(char* name, int, int device) { std::strcpy(name, device == 7 ? "A100" : "H100"); return 0; }
int cuDeviceGetUuid(char* uuid, int device) { std::memset(uuid, device, 16); return 0; }
int cuGetErrorName(int, const char** name) { *name = "CUDA_ERROR_NO_DEVICE"; return 0; }
}
"""


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """Returns a function that installs a driver library with two GPUs, whose cuInit returns `fails`."""

    def make(fails=0):
        path = tmp_path / f"libcuda{fails}.so"
        command = ["g++", "-shared", "-fPIC", f"-DFAILS={fails}", "-x", "c++", "-", "-o", path]
        subprocess.run(command, input=DRIVER, text=True, check=True)
        monkeypatch.setattr(nvidia_driver, "_DRIVER", str(path))

    return make


@pytest.fixture
def root(tmp_path, monkeypatch):
    """Returns the files of a host with two GPUs and TensorFlow for CUDA."""
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    monkeypatch.setattr(packages, "is_for_cuda", lambda: True)
    return tmp_path


def test_driver_lists_gpus_or_says_why_there_are_none(driver):
    driver()
    assert nvidia_driver.ask_driver() == nvidia_driver.Driver("", (12, 8), ("A100", "H100"), ("07" * 16, "08" * 16))
    assert (nvidia_driver.identity_of(1), nvidia_driver.identity_of(2)[:4]) == ("08" * 16, "2 of")
    driver(fails=100)
    assert nvidia_driver.ask_driver().problem == "the driver fails: error 100, CUDA_ERROR_NO_DEVICE"


def test_host_lists_its_gpus(root, driver):
    driver()
    found = gpus.check_host({}, root)
    assert found.severity is Severity.OK and "0: A100, 1: H100; the driver runs CUDA 12.8" in found.found


@pytest.mark.parametrize("visible", ["", " ", "-1"])
def test_host_reports_gpus_hidden_by_the_environment(root, visible):
    found = gpus.check_host({"CUDA_VISIBLE_DEVICES": visible}, root)
    assert found.severity is Severity.NOTE and f"2 here, hidden by CUDA_VISIBLE_DEVICES={visible!r}" == found.found


def test_host_reports_missing_parts(root, driver, monkeypatch):
    monkeypatch.setattr(nvidia_driver, "_DRIVER", "no-such-library.so")
    found = gpus.check_host({}, root)
    assert "no-such-library.so" in found.found and "Install NVIDIA's driver" in found.remedy
    driver(fails=100)
    assert "CUDA_ERROR_NO_DEVICE" in gpus.check_host({}, root).found
    monkeypatch.setattr(packages, "is_for_cuda", lambda: False)
    found = gpus.check_host({}, root)
    assert "a CPU build" in found.found and "tensorflow[and-cuda]" in found.remedy
    assert found.severity is Severity.WARNING


def test_container_without_gpus_differs_from_a_host_without_gpus(tmp_path):
    assert gpus.check_host({}, tmp_path) is None
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").touch()
    assert "--gpus all" in gpus.check_host({}, tmp_path).remedy


def test_libraries_missing_for_tensorflow_are_named(root, driver, monkeypatch):
    driver()
    here = gpus.check_host
    monkeypatch.setattr(gpus, "check_host", lambda: here({}, root))
    assert gpus.check_tensorflow(["A100", "H100"]).severity is Severity.OK
    found = gpus.check_tensorflow([])
    assert "did not find libcudart, " in found.found and "libcudnn" in found.found
    monkeypatch.setattr(gpus, "_LIBRARIES", ())
    assert "TF_CPP_MIN_LOG_LEVEL=0" in gpus.check_tensorflow([]).remedy
