"""Builds the software GPU in tests/device/native, which TensorFlow uses as a device of type "GPU".

ranks = run_ranks(program, 2, env=software_gpu.environment())
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

from harness import side_by_side
from keras_ddl import packages
from keras_ddl.compat import gpu_stream

NATIVE = Path(__file__).with_name("native")
_LIBCUDA = Path(__file__).parents[2] / "native"
WARNINGS = ["-Wall", "-Wextra", "-Werror"]
_FLAGS = [
    *WARNINGS,
    *(f"-I{_LIBCUDA / 'tests'}", f"-I{_LIBCUDA / 'core/include'}"),
    "-Wno-subobject-linkage",  # device.cc includes a source that has private types
    "-Wl,-soname,libcuda.so.1",  # under this name the device layer finds libcuda
]


def environment(num_devices: int = 2, stream: str | Path = "") -> dict[str, str]:
    """Returns the environment variables that give TensorFlow `num_devices` software GPUs.

    stream: the value of KERAS_DDL_TF_STREAM; "": the software GPU's own library.
    """
    return {
        "TF_PLUGGABLE_DEVICE_LIBRARY_PATH": str(library()),
        "SOFTWARE_GPU_DEVICES": str(num_devices),
        "KERAS_DDL_TF_STREAM": str(stream or library()),
    }


@functools.cache
def library() -> Path:
    """Returns the library. Building it takes half a minute if its sources or TensorFlow changed."""
    sources = sorted(NATIVE.glob("*.cc"))
    read = [*sources, *NATIVE.glob("*.h"), *_LIBCUDA.glob("tests/device/stand_in*"), Path(gpu_stream.__file__)]
    version = packages.version(*packages.TENSORFLOWS)
    content = b"|".join([version.encode(), Path(__file__).read_bytes(), *(each.read_bytes() for each in read)])
    path = side_by_side.folder() / f"software_gpu-{hashlib.sha256(content).hexdigest()[:16]}.so"
    gpu_stream.compile_with_tensorflow(sources, path, _FLAGS)
    return path
