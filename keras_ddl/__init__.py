"""keras_ddl: distributed data-parallel training for Keras 3.

    strategy = keras_ddl.Strategy()
    with strategy.scope():
        model = ...
        model.compile(...)
    model.fit(x, y, batch_size=...)

`import keras_ddl` is cheap: TensorFlow, Keras, mpi4py and NumPy are imported by the names that need them, when they
are first used.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

# Imported here on purpose: a later import of the module would hide the function `topology` below.
import keras_ddl.topology as _topology_module

if TYPE_CHECKING:
    # Parts, of which some may be missing (parts.py): only for type checkers, which need all names.
    from keras_ddl import callbacks, checkpoint, communicator, data, errors, model_state, ops, schedules
    from keras_ddl import cost_model as cost_model
    from keras_ddl import export as export
    from keras_ddl import horovod as horovod
    from keras_ddl import timeline as timeline
    from keras_ddl import tuner as tuner
    from keras_ddl.communicator import (
        Communicator,
        all_gather_object,
        barrier,
        broadcast_object,
        init,
        is_initialized,
        join,
        local_rank,
        local_size,
        num_hosts,
        rank,
        regroup,
        shutdown,
        size,
        split,
    )
    from keras_ddl.launch import run
    from keras_ddl.ops import (
        all_gather,
        all_reduce,
        all_reduce_n,
        all_to_all,
        broadcast,
        broadcast_variables,
        reduce_scatter,
    )
    from keras_ddl.strategy import Strategy
    from keras_ddl.strategy.mesh import device_mesh

    __version__: str

_MODULES = ("callbacks", "checkpoint", "communicator", "data", "errors", "model_state", "ops", "schedules")

_HOMES = {
    "communicator": "init shutdown is_initialized rank regroup size local_rank local_size num_hosts barrier join split "
    "broadcast_object all_gather_object Communicator",
    "launch": "run",
    "ops": "all_reduce all_reduce_n reduce_scatter all_gather all_to_all broadcast broadcast_variables",
    "strategy": "Strategy",
    "strategy.mesh": "device_mesh",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}

__all__ = [
    "Communicator",
    "Strategy",
    "__version__",
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "all_reduce_n",
    "all_to_all",
    "barrier",
    "broadcast",
    "broadcast_object",
    "broadcast_variables",
    "callbacks",
    "checkpoint",
    "communicator",
    "data",
    "device_mesh",
    "errors",
    "init",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "model_state",
    "num_hosts",
    "ops",
    "rank",
    "reduce_scatter",
    "regroup",
    "run",
    "schedules",
    "shutdown",
    "size",
    "split",
    "topology",
]


def topology() -> _topology_module.Topology:
    """Returns where the ranks are, as a `Topology`.

    Raises:
        NotInitializedError: before `init` or after `shutdown`.
    """
    from keras_ddl import communicator

    return communicator.topology()


def _extend_path() -> None:
    """Lets Python find parts and native libraries when keras_ddl is imported from its source folder.

    In that folder keras_ddl.export lies in <root>/export, keras_ddl.horovod in <root>/integrations/horovod, and the
    libraries in the site-packages/keras_ddl of an install.
    """
    import site
    from pathlib import Path

    root = Path(__file__).parents[1]
    if not (root / "native" / "CMakeLists.txt").exists():
        return  # an installed package is complete
    # These come before installed parts, because parts must have the version of this folder.
    __path__.extend(str(folder) for folder in (root, root / "integrations", root / "observe"))
    for entry in [*sys.path, *site.getsitepackages()]:
        other = Path(entry or ".", "keras_ddl").absolute()
        if (other / "libkeras_ddl.so").exists() and str(other) not in __path__:
            __path__.append(str(other))


if not TYPE_CHECKING:  # a type checker would otherwise accept any name

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            return importlib.import_module(f"keras_ddl.{name}")
        if name in _HOME_OF:
            home = importlib.import_module(f"keras_ddl.{_HOME_OF[name]}")
            value = getattr(home, name)
        elif name == "__version__":
            value = importlib.import_module("keras_ddl.config").version()
        else:
            parts = importlib.import_module("keras_ddl.parts")
            if name in parts.public():
                return importlib.import_module(f"keras_ddl.{name}")
            missing = parts.is_missing(name)
            raise AttributeError(
                parts.why_missing(name) if missing else f"module 'keras_ddl' has no attribute {name!r}"
            )
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    parts = importlib.import_module("keras_ddl.parts")
    return sorted([*__all__, *parts.public()])


class _MissingParts:
    """The last module finder; it raises an error that names the part that is not installed."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        word = name.removeprefix("keras_ddl.")
        if word != name and "." not in word:
            parts = importlib.import_module("keras_ddl.parts")
            if parts.is_missing(word):
                raise ModuleNotFoundError(parts.why_missing(name), name=name)


_extend_path()
sys.meta_path.append(_MissingParts)
_processes = sys.modules.get("multiprocessing.process")
if _processes is not None and getattr(_processes.current_process(), "_inheriting", False):
    # A child process imports the script of its parent.
    from keras_ddl.communicator.reporting import child_process

    child_process.watch_import()

# Launchers set one of these (topology/launcher.py). Without it, the module is not imported, which saves milliseconds.
_RANK_VARIABLES = (
    *("KERAS_DDL_HOST_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK"),
    *("SLURM_PROCID", "PMIX_RANK"),
)
if any(name in os.environ for name in _RANK_VARIABLES):
    for _begin in importlib.import_module("keras_ddl.parts").provided("in_ranks"):
        _begin()
