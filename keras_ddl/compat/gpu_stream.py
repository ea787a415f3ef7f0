"""Builds and loads the library that lets collectives take TensorFlow's tensors where they are, on the GPU.

A collective must wait for the stream on which TensorFlow computes, and only TensorFlow's C++ interface, which changes
with every version, tells that stream. So the library is built on the user's machine, for the installed TensorFlow.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from keras_ddl import config, packages
from keras_ddl.communicator.native import native_library
from keras_ddl.errors import DependencyError

_FLAGS = ("-std=c++17", "-O1", "-fPIC", "-shared", "-fvisibility=hidden", "-DEIGEN_MAX_ALIGN_BYTES=64")


def path() -> Path:
    """Returns the place of the library, which `build` may still have to make.

    Raises: DependencyError: it cannot be built, or KERAS_DDL_TF_STREAM forbids it.
    """
    chosen: str = config.get("TF_STREAM")
    if chosen == "none":
        raise DependencyError("KERAS_DDL_TF_STREAM=none")
    if chosen != "auto":
        return Path(chosen)  # the dynamic loader says whether it is there
    if not packages.is_for_cuda():
        raise DependencyError("the installed TensorFlow is not a CUDA build")
    built_from = hashlib.sha256(source().read_bytes()).hexdigest()[:8]
    version = packages.version(*packages.TENSORFLOWS)
    place = source().with_name(f"libkeras_ddl_stream-{version}-{built_from}.so")
    if not place.exists() and shutil.which("g++") is None:
        raise DependencyError(f"{place.name} is missing, and there is no g++ to build it")
    if not place.exists() and not os.access(place.parent, os.W_OK):
        raise DependencyError(f"{place.name} is missing, and this user may not write to {place.parent}")
    return place


def build() -> Path:
    """Returns the library, after building it if it is missing, which takes half a minute. TensorFlow must be imported.

    Raises: DependencyError: see `path`; or the compiler failed, or the library does not load.
    """
    place = path()
    try:
        if not place.exists():
            compile_with_tensorflow([source()], place)
        ctypes.CDLL(str(place))
    except OSError as error:
        raise DependencyError(f"{place}: {error}") from error
    return place


def source() -> Path:
    """Returns the library's source, which is installed beside the native libraries."""
    return native_library.library_path("gpu_stream.cc")


def compile_with_tensorflow(sources: Sequence[Path], library: Path, flags: Sequence[str] = ()) -> None:
    """Compiles C++ sources that use TensorFlow's headers. If several processes do so, the others wait for the first.

    Raises: OSError: the compiler failed.
    """
    spec = importlib.util.find_spec("tensorflow")  # imports nothing
    assert spec is not None and spec.origin is not None
    tensorflow = Path(spec.origin).parent
    with library.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if library.exists():
            return
        partial = library.with_suffix(f".{os.getpid()}")
        command = ["g++", *_FLAGS, *flags, "-isystem", f"{tensorflow}/include", *map(str, sources)]
        command += [f"-L{tensorflow}", "-l:libtensorflow_framework.so.2", "-o", str(partial)]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
        if done.returncode != 0:
            raise OSError(f"g++ failed: {done.stderr}")
        partial.rename(library)


@functools.cache
def load(library: Path) -> None:
    """Lets native/tf find a library that `build` has returned. Call it before `load_ops`."""
    ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)


def is_loaded() -> bool:
    """Returns whether the ops take tensors on the GPU."""
    return load.cache_info().currsize > 0
