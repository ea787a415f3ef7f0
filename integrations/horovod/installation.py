"""Makes `import horovod.tensorflow` find keras_ddl.horovod, in this process or in every process of a job."""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from keras_ddl.errors import ConfigError

# A folder for PYTHONPATH, with a package `horovod` that calls `install`, for unchanged scripts.
FOLDER = Path(__file__).with_name("shim")

# Horovod's modules -> ours, which have the same names.
_MODULES = {
    "horovod.common": "keras_ddl.horovod",
    "horovod.common.elastic": "keras_ddl.horovod.elastic",
    "horovod.common.exceptions": "keras_ddl.horovod.elastic",
    "horovod.tensorflow": "keras_ddl.horovod",
    "horovod.tensorflow.compression": "keras_ddl.horovod.compression",
    "horovod.tensorflow.elastic": "keras_ddl.horovod.elastic",
    **dict.fromkeys(("horovod.tensorflow.functions", "horovod.tensorflow.mpi_ops"), "keras_ddl.horovod"),
    "horovod.tensorflow.sync_batch_norm": "keras_ddl.horovod",
    "horovod.tensorflow.keras": "keras_ddl.horovod.keras",
    "horovod.tensorflow.keras.callbacks": "keras_ddl.horovod.callbacks",
    "horovod.tensorflow.keras.elastic": "keras_ddl.horovod.keras_elastic",
    "horovod.keras": "keras_ddl.horovod.keras",
    "horovod.keras.callbacks": "keras_ddl.horovod.callbacks",
    "horovod.keras.elastic": "keras_ddl.horovod.keras_elastic",
}
# Modules of Horovod that keras_ddl does not provide -> what to use instead.
_ABSENT = {
    "horovod.torch": "A program of PyTorch uses keras_ddl.torch, a backend of torch.distributed "
    "(integrations/torch/docs/pytorch.md).",
    "horovod.tensorflow.data": "Use tf.data.experimental.service directly, with your own dispatcher and workers.",
    "horovod.mxnet": "keras_ddl does not support MXNet.",
    **dict.fromkeys(
        ("horovod.runner", "horovod.spark", "horovod.ray"), "Start ranks with keras-ddl run or keras_ddl.run."
    ),
}
# Names of Keras 2 that Keras 3 lacks -> what to write.
_INSTEAD = {
    "fit_generator": "model.fit, which takes generators and datasets",
    "evaluate_generator": "model.evaluate",
    "set_session": 'tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")',
    "get_session": "eager execution: tensors have numpy()",
    "ImageDataGenerator": "a tf.data.Dataset, and keras.layers.RandomRotation and the like",
}


def explain_old_names() -> None:
    """Makes an uncaught error about a name of Keras 2 or TensorFlow 1 end with a replacement. Imports nothing."""
    hook = sys.excepthook

    def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        with contextlib.suppress(Exception):  # explaining must not hide the error itself
            explain(error)
        hook(kind, error, trace)

    sys.excepthook = excepthook


def explain(error: BaseException) -> None:
    """Adds a replacement to the message of an AttributeError or ImportError about a name of Keras 2 or TensorFlow 1."""
    if isinstance(error, AttributeError):
        name, owner = error.name, error.obj
        old = getattr(getattr(owner, "compat", None), "v1", None)
        is_in_tensorflow = getattr(owner, "__name__", "") == "tensorflow" and hasattr(old, str(name))
    elif isinstance(error, ImportError):
        match = re.match(r"cannot import name '(\w+)' from '(?:tensorflow\.)?keras", str(error))
        name, is_in_tensorflow = match and match[1], False
    else:
        return
    if is_in_tensorflow:
        text = f"This is a name of TensorFlow 1: tf.compat.v1.{name}. Scripts of Keras 3 need no session"
    elif name in _INSTEAD:
        text = f"This is a name of Keras 2. Use {_INSTEAD[name]}"
    else:
        return
    message = f"{error}. {text}; see integrations/horovod/docs/from-horovod.md."
    error.args = (message,)
    if isinstance(error, ImportError):
        error.msg = message


def install() -> None:
    """Makes `import horovod.tensorflow`, and imports of the other modules that keras_ddl replaces, find keras_ddl's.

    It affects this process only; `keras-ddl run --as-horovod` does it for all ranks of a job. Idempotent.

    Raises: ConfigError: a Horovod is installed, or has been imported.
    """
    check_no_other()
    if not is_installed():
        sys.meta_path.insert(0, _Finder())
        explain_old_names()
    if str(FOLDER) not in sys.path:  # for processes that inherit the path (keras_ddl.run, multiprocessing)
        sys.path.append(str(FOLDER))
    importlib.import_module("horovod")


def check_no_other() -> None:
    """Raises: ConfigError: a Horovod is installed here, or has been imported."""
    module = sys.modules.get("horovod")
    where = getattr(module, "__file__", None)
    if module is None:
        elsewhere = [entry for entry in sys.path if Path(entry or ".").resolve() != FOLDER.resolve()]
        spec = importlib.machinery.PathFinder.find_spec("horovod", elsewhere)
        where = spec.origin if spec is not None else None  # None: only a folder of that name
    if where is not None and not Path(where).resolve().is_relative_to(FOLDER.resolve()):
        raise ConfigError(
            f"keras_ddl.horovod can replace Horovod only if Horovod is not installed. Received: {where}. Uninstall it "
            "(`pip uninstall horovod`), or change the script's import to `import keras_ddl.horovod as hvd`."
        )


def is_installed() -> bool:
    return any(isinstance(finder, _Finder) for finder in sys.meta_path)


def python_path(rest: str) -> str:
    """Returns the PYTHONPATH `rest` with FOLDER in front, so that processes `install` when they import horovod."""
    return ":".join([str(FOLDER), *([rest] if rest else [])])


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules below horovod."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if not name.startswith("horovod."):
            return None
        home = _MODULES.get(name)
        if home is None or importlib.util.find_spec(home) is None:
            instead = next((text for absent, text in _ABSENT.items() if f"{name}.".startswith(f"{absent}.")), "")
            raise ModuleNotFoundError(
                f"keras_ddl does not replace {name}. {instead or 'There are alternatives.'} "
                "See integrations/horovod/docs/from-horovod.md. "
                f"It replaces {', '.join(_available())}.",
                name=name,
            )
        return importlib.machinery.ModuleSpec(name, _Loader(home))


class _Loader(importlib.abc.Loader):
    """Returns keras_ddl's existing module for an import, so that it is not loaded twice."""

    def __init__(self, home: str) -> None:
        self._home = home

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        real = importlib.import_module(self._home)
        sys.modules[name] = real
        if not hasattr(real, "__path__"):  # then Python looks for submodules in sys.modules only
            for below in _available():
                if below.startswith(f"{name}."):
                    sys.modules[below] = importlib.import_module(_MODULES[below])


def _available() -> list[str]:
    return [name for name, home in _MODULES.items() if importlib.util.find_spec(home) is not None]
