"""Runs before the program of a rank: turns garbage collection off while TensorFlow, Keras or PyTorch is imported.

Such an import creates a million lasting objects, which Python's garbage collector scans again and again without
result. The scans take 0.8 of the 2.9 s of `import keras`, on every rank at the same time.
"""

from __future__ import annotations  # a program may start other, older Pythons

import gc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

_here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120


def _without(paths: list[str]) -> list[str]:
    return [path for path in paths if os.path.abspath(path or ".") != _here]  # noqa: PTH100


class _LargeImports:
    """A finder before all others that changes how a few modules are executed, once per module."""

    def __init__(self, names: set[str]) -> None:
        self._names = names

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if path is not None or name not in self._names:
            return None
        self._names.discard(name)
        try:
            spec = importlib.util.find_spec(name)  # asks the other finders
        finally:
            self._names.add(name)  # a program that asks whether a module is installed may import it later
        loader = None if spec is None else spec.loader
        if loader is not None and hasattr(loader, "__dict__"):
            vars(loader)["exec_module"] = self._without_collections(loader, loader.exec_module)
        return spec

    def _without_collections(
        self, loader: object, execute: Callable[[ModuleType], None]
    ) -> Callable[[ModuleType], None]:
        def execute_quickly(module: ModuleType) -> None:
            self._names.discard(module.__name__)
            del vars(loader)["exec_module"]  # so that the method of its class is used again
            was_enabled = gc.isenabled()
            gc.disable()
            try:
                execute(module)
            finally:
                if was_enabled:
                    if not gc.get_freeze_count():  # otherwise the program itself has frozen objects
                        # Makes all objects old without scanning them. Otherwise the next collection of young objects
                        # would scan them.
                        gc.freeze()
                        gc.unfreeze()
                    gc.enable()

        return execute_quickly


sys.meta_path.insert(0, _LargeImports({"tensorflow", "keras", "torch"}))

# The program and its child processes should not find this module.
sys.path[:] = _without(sys.path)
os.environ["PYTHONPATH"] = os.pathsep.join(_without(os.environ.get("PYTHONPATH", "").split(os.pathsep)))
if not os.environ["PYTHONPATH"]:
    del os.environ["PYTHONPATH"]
# The sitecustomize that would have run without this one.
_spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
if _spec is not None and _spec.loader is not None:
    _spec.loader.exec_module(importlib.util.module_from_spec(_spec))
