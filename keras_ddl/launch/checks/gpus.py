"""Checks which GPUs of this host the kernel, NVIDIA's driver and TensorFlow see, and why TensorFlow sees none."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from keras_ddl import packages
from keras_ddl.launch.checks.finding import Finding, Severity

# TensorFlow's CUDA build loads these libraries when it looks for GPUs, and sees no GPU if one library is missing.
_LIBRARIES = ("cudart", "cublas", "cublasLt", "cufft", "cusolver", "cusparse", "cudnn")
_DRIVER = "libcuda.so.1"
_IN_CONTAINERS = "If this is a container, start it with its GPUs: docker run --gpus all."
_OWN_MESSAGE = (
    "`TF_CPP_MIN_LOG_LEVEL=0 python -c \"import tensorflow; tensorflow.config.list_physical_devices('GPU')\"` shows "
    "TensorFlow's own message."
)


@dataclass(frozen=True)
class Driver:
    """The driver library's facts about the GPUs that this process may use.

    `problem`: why there are no facts, or "". `cuda`: the newest CUDA version that the driver runs, as (12, 8).
    """

    problem: str = ""
    cuda: tuple[int, int] = (0, 0)
    names: tuple[str, ...] = ()
    ids: tuple[str, ...] = ()


def device_files(root: Path = Path("/")) -> list[Path]:
    """Returns the device files of NVIDIA's GPUs, one each."""
    return sorted(path for path in (root / "dev").glob("nvidia*") if path.name.removeprefix("nvidia").isdecimal())


def ask_driver() -> Driver:
    """Asks NVIDIA's driver for the GPUs, without using memory on them."""
    try:
        cuda = ctypes.CDLL(_DRIVER)
    except OSError as error:
        return Driver(f"the driver's library cannot be loaded: {error}")
    number = ctypes.c_int()
    if failed := cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(number)):
        text = ctypes.c_char_p()
        cuda.cuGetErrorName(failed, ctypes.byref(text))
        return Driver(f"the driver fails: error {failed}, {(text.value or b'without a name').decode()}")
    count = number.value
    cuda.cuDriverGetVersion(ctypes.byref(number))
    get_uuid = getattr(cuda, "cuDeviceGetUuid_v2", cuda.cuDeviceGetUuid)  # it also distinguishes parts of a GPU
    names, ids = [], []
    for index in range(count):
        device, name, uuid = ctypes.c_int(), ctypes.create_string_buffer(256), ctypes.create_string_buffer(16)
        cuda.cuDeviceGet(ctypes.byref(device), index)
        cuda.cuDeviceGetName(name, len(name), device)
        get_uuid(uuid, device)
        names.append(name.value.decode(errors="replace"))
        ids.append(uuid.raw.hex())
    return Driver("", (number.value // 1000, number.value % 1000 // 10), tuple(names), tuple(ids))


def identity_of(index: int) -> str:
    """Returns a unique name of this process's GPU `index`, even if processes see different GPUs."""
    ids = ask_driver().ids
    return ids[index] if index < len(ids) else f"{index} of {os.environ.get('CUDA_VISIBLE_DEVICES', 'all')}"


def check_host(environ: Mapping[str, str] = os.environ, root: Path = Path("/")) -> Finding | None:
    """Returns what stops TensorFlow from using this host's GPUs, or names them; None: the host has none.

    Imports no TensorFlow, so a CUDA library that TensorFlow will not find goes unnoticed: see `check_tensorflow`.
    """
    files = device_files(root)
    if not files:
        if not (root / "proc/driver/nvidia/version").exists():
            return None
        return _missing("this host's kernel has NVIDIA's driver, but no GPU is given to this process", _IN_CONTAINERS)
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and (not visible.strip() or visible.strip().startswith("-")):
        hidden = f"{len(files)} here, hidden by CUDA_VISIBLE_DEVICES={visible!r}"
        return Finding(Severity.NOTE, "GPUs", hidden, "Unset it if ranks should use them.")
    if packages.is_for_cuda() is False:
        found = f"{len(files)} here, but the installed TensorFlow is a CPU build"
        return _missing(found, packages.install_tensorflow(for_gpus=True))
    driver = ask_driver()
    if driver.problem:
        return _missing(f"{len(files)} here, but {driver.problem}", f"Install NVIDIA's driver. {_IN_CONTAINERS}")
    names = ", ".join(f"{index}: {name}" for index, name in enumerate(driver.names))
    return Finding(Severity.OK, "GPUs", f"{names}; the driver runs CUDA {_dotted(driver.cuda)} and older")


def names_in_tensorflow() -> list[str]:
    """Returns the name of each GPU that TensorFlow sees. Imports TensorFlow, but does not initialize it."""
    import tensorflow as tf

    gpus = tf.config.list_physical_devices("GPU")
    return [tf.config.experimental.get_device_details(each).get("device_name", each.name) for each in gpus]


def check_tensorflow(names: list[str]) -> Finding | None:
    """Returns `check_host`'s finding, or why TensorFlow sees no GPU although the driver does.

    Args:
        names: the result of `names_in_tensorflow`.
    """
    found = check_host()
    if names or found is None or found.severity is not Severity.OK:
        return found
    import tensorflow as tf

    needed = tf.sysconfig.get_build_info().get("cuda_version", "")
    newest = ask_driver().cuda
    if needed and int(needed.split(".")[0]) > newest[0]:
        remedy = "Install a newer driver, or a TensorFlow built for this driver's CUDA."
        return _missing(f"TensorFlow is for CUDA {needed}, and the driver runs {_dotted(newest)} at most", remedy)
    loaded = Path("/proc/self/maps").read_text(errors="replace")
    if missing := [f"lib{each}" for each in _LIBRARIES if f"/lib{each}.so" not in loaded]:
        remedy = packages.install_tensorflow(for_gpus=True)
        return _missing(f"TensorFlow sees none, because it did not find {', '.join(missing)}", remedy)
    return _missing(f"TensorFlow sees none of these: {found.found}", _OWN_MESSAGE)


def _missing(found: str, remedy: str) -> Finding:
    return Finding(Severity.WARNING, "GPUs", found, remedy)


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
