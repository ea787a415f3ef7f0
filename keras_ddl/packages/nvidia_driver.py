"""Asks the kernel and NVIDIA's driver which GPUs this process may use, without TensorFlow."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path

_DRIVER = "libcuda.so.1"


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
    # The newer function also distinguishes parts of a GPU.
    get_uuid = cuda.cuDeviceGetUuid_v2 if hasattr(cuda, "cuDeviceGetUuid_v2") else cuda.cuDeviceGetUuid
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
