"""Measures the shortest time in which ranks can pass cache lines between their cores (native/bench/hand_over.h).

The library is built on first use, which needs CMake and a C++ compiler.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent


def build(folder: Path) -> Path | None:
    """Builds the library in `folder` and returns its path, or prints why it cannot be built and returns None."""
    beside_python = str(Path(sys.executable).parent)
    path = os.pathsep.join([beside_python, os.environ.get("PATH", "")])
    cmake = shutil.which("cmake", path=path)
    options = [f"-DKERAS_DDL_{name}" for name in ("MPI=OFF", "TF=OFF", "BENCH=ON")]
    steps = [["-S", str(ROOT / "native"), "-B", str(folder), *options]]
    steps.append(["--build", str(folder), "--target", "keras_ddl_hand_over", "--parallel"])
    for step in steps:
        done = cmake and subprocess.run(
            [cmake, *step], capture_output=True, text=True, env={**os.environ, "PATH": path}
        )
        if not done or done.returncode:
            why = done.stderr.strip().splitlines()[-1:] if done else ["CMake was not found"]
            print(f"without the hand-over bound, which needs CMake and a C++ compiler: {''.join(why)}", file=sys.stderr)
            return None
    return folder / "bench" / "libhand_over.so"


def shared_file(library: Path, ranks: int, nbytes: int) -> str:
    """Makes the file of zeros through which `ranks` ranks pass `nbytes`; the caller removes it."""
    file, name = tempfile.mkstemp(prefix="hand_over-", dir="/dev/shm")
    os.truncate(file, _load(library).hand_over_shared_bytes(ranks, nbytes))
    os.close(file)
    return name


def seconds(library: str, name: str, rank: int, ranks: int, array: np.ndarray, repeat: int) -> float:
    """Returns the seconds per all-reduce of the bytes of `array`, which is overwritten. COLLECTIVE."""
    with Path(name).open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        shared = (ctypes.c_char * len(memory)).from_buffer(memory)
        hand_over = _load(Path(library)).hand_over_seconds
        hand_over.restype = ctypes.c_double
        size = ctypes.c_size_t(array.nbytes)
        took = min(hand_over(shared, rank, ranks, ctypes.c_void_p(array.ctypes.data), size, repeat, w) for w in (0, 1))
        del shared
    return took


def _load(library: Path) -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(library))
    loaded.hand_over_shared_bytes.restype = ctypes.c_size_t
    loaded.hand_over_shared_bytes.argtypes = [ctypes.c_int, ctypes.c_size_t]
    return loaded
