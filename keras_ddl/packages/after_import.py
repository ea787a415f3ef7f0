"""Calls a function when a module has been imported, before the importing program continues."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType


class AfterImport(importlib.abc.MetaPathFinder):
    """Finds the modules named in `calls` as Python does, and calls a module's function after it has been imported."""

    def __init__(self, calls: Mapping[str, Callable[[ModuleType], None]]) -> None:
        self.calls = calls

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self.calls:
            return None
        finders = (each for each in sys.meta_path if each is not self)
        spec = next((spec for each in finders if (spec := each.find_spec(name, path, target)) is not None), None)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_call(module: ModuleType) -> None:
                run(module)
                self.calls[name](module)

            spec.loader.exec_module = run_and_call  # type: ignore[method-assign]
        return spec
