"""Makes processes that tests start import TensorFlow, Keras and PyTorch in half the CPU time.

A third of the import time is full garbage collections, which visit a million objects that all stay. Another third is
scikit-learn, matplotlib and IPython, which Keras imports if they are installed. So the collector is off during such an
import and ignores the imported objects afterwards, and Keras does not see these packages; the program itself can import
them.

Python imports this module when it starts with this folder in PYTHONPATH. `conftest.py` puts it there, so that
processes at any depth find it, and imports it for pytest itself. Processes that ignore PYTHONPATH start as usual.

Modules named in TESTS_HIDE are not found, as if they were not installed.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

_OF_KERAS = ("sklearn", "matplotlib", "IPython")
_HIDDEN_DURING = {"keras": _OF_KERAS, "tensorflow": _OF_KERAS, "torch": ()}


class QuickImports(MetaPathFinder):
    """Finds the large packages like Python, and changes how they are executed."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name in _HIDDEN_DURING else None
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = _quick(spec.loader.exec_module)  # type: ignore[method-assign]
        return spec


def _quick(execute: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
    def execute_quickly(module: ModuleType) -> None:
        hidden = [name for name in _HIDDEN_DURING[module.__name__] if name not in sys.modules]
        was_enabled = gc.isenabled()
        gc.disable()
        sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None: importing it is an ImportError
        try:
            execute(module)
        finally:
            for each in hidden:
                del sys.modules[each]
            if was_enabled:
                gc.freeze()
                gc.enable()

    return execute_quickly


sys.meta_path.insert(0, QuickImports())
sys.modules.update(dict.fromkeys(os.environ.get("TESTS_HIDE", "").split()))  # type: ignore[arg-type]
