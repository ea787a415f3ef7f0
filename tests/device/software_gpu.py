"""Builds the software GPU in tests/device/native, which TensorFlow uses as a device of type "GPU".

ranks = run_ranks(program, 2, env=software_gpu.environment())
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib.util
import os
import subprocess
from pathlib import Path

from harness import side_by_side
from keras_ddl import packages

NATIVE = Path(__file__).with_name("native")
_FLAGS = [
    *("-std=c++17", "-O1", "-fPIC", "-shared", "-fvisibility=hidden", "-DEIGEN_MAX_ALIGN_BYTES=64"),
    *("-Wall", "-Wextra", "-Werror"),
]


def environment(num_devices: int = 2) -> dict[str, str]:
    """Returns the environment variables that give TensorFlow `num_devices` software GPUs."""
    return {"TF_PLUGGABLE_DEVICE_LIBRARY_PATH": str(library()), "SOFTWARE_GPU_DEVICES": str(num_devices)}


@functools.cache
def library() -> Path:
    """Returns the library. Building it takes half a minute if its sources or TensorFlow changed."""
    sources = sorted(NATIVE.iterdir())
    version = packages.version(*packages.TENSORFLOWS)
    content = b"|".join([version.encode(), *map(str.encode, _FLAGS), *(each.read_bytes() for each in sources)])
    path = side_by_side.folder() / f"software_gpu-{hashlib.sha256(content).hexdigest()[:16]}.so"
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one test process builds while the others wait
        if not path.exists():
            compile_library([each for each in sources if each.suffix == ".cc"], path)
    return path


def compile_library(sources: list[Path], path: Path) -> None:
    """Compiles C++ files that may use TensorFlow into one library."""
    tensorflow = Path(importlib.util.find_spec("tensorflow").origin).parent  # imports nothing
    partial = path.with_suffix(f".{os.getpid()}")
    command = ["g++", *_FLAGS, "-isystem", f"{tensorflow}/include", *sources]
    command += [f"-L{tensorflow}", "-l:libtensorflow_framework.so.2", "-o", partial]
    subprocess.run(command, check=True)
    partial.rename(path)
