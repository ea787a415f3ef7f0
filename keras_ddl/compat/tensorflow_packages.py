"""Finds out from package metadata which TensorFlow is installed, without importing TensorFlow or Keras."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from keras_ddl import packages
from keras_ddl.errors import DependencyError

_LIBRARIES = ("tensorflow/libtensorflow_framework.so.2", "tensorflow/libtensorflow_cc.so.2")


def check_one_tensorflow() -> None:
    """Checks that at most one TensorFlow owns the folder tensorflow/.

    Two packages of equal content (a package and its renamed copy) do no harm. Two of different content overwrite each
    other: which one runs depends on the order of installation, and uninstalling either breaks the other.

    Raises:
        DependencyError: two distributions, of different versions or with different libraries.
    """
    installed: dict[str, tuple[str, frozenset[str]]] = {}
    for name in packages.TENSORFLOWS:
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        record = distribution.read_text("RECORD") or ""
        libraries = frozenset(line for line in record.splitlines() if line.startswith(_LIBRARIES))
        if libraries:
            installed[f"{name} {distribution.version}"] = (distribution.version, libraries)
    if len(set(installed.values())) > 1:
        raise DependencyError(
            "Only one TensorFlow package may be installed, because all of them own the folder tensorflow/. Received: "
            f"{' and '.join(installed)}. Uninstall all of them and install one; then install packages that require "
            "`tensorflow` (tensorflow-serving-api, keras-hub) with --no-deps. To install TensorFlow: "
            f"{packages.install_tensorflow()}"
        )


def import_without_keras() -> None:
    """Imports TensorFlow without Keras, which takes a third of the time, for commands that do not need Keras.

    `import keras`, `tf.keras` and `import tensorflow.keras` work afterwards as usual.
    If TensorFlow cannot be imported, the next import raises the error; if TensorFlow is set to use Keras 2, it is
    imported with Keras 2.
    """
    if "tensorflow" in sys.modules or os.environ.get("TF_USE_LEGACY_KERAS"):
        return
    hidden = [name for name in ("keras", "tf_keras") if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None: as if it were not installed
    try:
        with contextlib.suppress(ImportError):
            import tensorflow
    finally:
        for name in hidden:
            del sys.modules[name]
    keras = importlib.util.find_spec("keras")  # does not import it
    if "tensorflow" in sys.modules and keras is not None and keras.submodule_search_locations:
        # The place where TensorFlow 2.16 and later look for tensorflow.keras if they find Keras.
        folders = [str(Path(folder, "_tf_keras")) for folder in keras.submodule_search_locations]
        tensorflow.__path__ = [*folders, *filter(None, tensorflow.__path__)]


# Advice for distributing training with Keras on another backend.
_INSTEAD = {
    "torch": (
        " On PyTorch, instead of keras_ddl.Strategy: import keras_ddl.torch, "
        "torch.distributed.init_process_group('ddl'), and keras.distribution.DataParallel or "
        "torch.nn.parallel.DistributedDataParallel (integrations/torch/docs/pytorch.md)."
    ),
}


def check_keras_backend() -> None:
    """Checks that Keras runs, or will run, on TensorFlow.

    Raises:
        DependencyError: KERAS_BACKEND, or the Keras that is already imported, names another backend.
    """
    if "keras" in sys.modules and hasattr(sys.modules["keras"], "config"):
        backend, source = sys.modules["keras"].config.backend(), "keras was imported with backend"
    else:
        backend, source = os.environ.get("KERAS_BACKEND") or "tensorflow", "KERAS_BACKEND ="
    if backend != "tensorflow":
        raise DependencyError(
            f"keras_ddl works with Keras on TensorFlow. Received: {source} {backend!r}. "
            "Set KERAS_BACKEND=tensorflow before keras is imported (or in ~/.keras/keras.json)."
            f"{_INSTEAD.get(backend, '')}"
        )


def check_version(version: str, oldest: tuple[int, int]) -> tuple[int, int]:
    """Returns (major, minor) of a TensorFlow version.

    Raises:
        DependencyError: older than `oldest`, or another major version, which cannot load the native library.
    """
    major, minor = (int(word) for word in version.split(".")[:2])
    if (major, minor) < oldest or major != oldest[0]:
        raise DependencyError(
            f"keras_ddl needs TensorFlow {oldest[0]}.{oldest[1]} or newer, below {oldest[0] + 1}.0. Received: "
            f"TensorFlow {version}. Install one of these versions: {packages.install_tensorflow()}"
        )
    return major, minor


@contextlib.contextmanager
def private_imports(package: str, works: str) -> Iterator[None]:
    """Wraps imports of private parts of `package`, which another version may lack.

    Raises:
        DependencyError: a part is missing; the message names it and `works`, the versions that have it.
    """
    try:
        yield
    except (ImportError, AttributeError) as error:
        remedy = packages.install_tensorflow() if package == "tensorflow" else packages.pip_install(package)
        version = getattr(sys.modules.get(package), "__version__", "of unknown version")
        raise DependencyError(
            f"keras_ddl uses private parts of {package} and works with {package} {works}. Received: {package} "
            f"{version}, which lacks one of these parts: {error}. Install a version that works: {remedy}"
        ) from error


def not_installed(error: ImportError) -> DependencyError:
    """Returns the error for a TensorFlow that cannot be imported."""
    if error.name == "tensorflow":
        return DependencyError(
            "This part of keras_ddl needs TensorFlow, which comes with an extra. Received: no TensorFlow in "
            f"{sys.prefix}. Install it (for NVIDIA GPUs the extra tensorflow-gpu): {packages.install_tensorflow()}"
        )
    return DependencyError(
        f"TensorFlow is installed but cannot be imported. Received: {type(error).__name__}: {error}. Run `python -c "
        "'import tensorflow'`, and repair the TensorFlow installation first."
    )
