"""Loads the project's modules from their sources, and programs beside the package as modules."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from keras_ddl import parts

ROOT = Path(__file__).resolve().parents[2]


def structure(name: str) -> ModuleType:
    """Returns a module of tools/structure."""
    if (tools := str(ROOT / "tools")) not in sys.path:
        sys.path.append(tools)  # last, so that other names take precedence
    return importlib.import_module(f"structure.{name}")


PARTS = {name: ROOT / folder for name, folder in parts.FOLDERS.items() if (ROOT / folder).is_dir()}
MODULES: dict[str, Path] = structure("sources").Project(ROOT).modules


def load_program(path: Path) -> ModuleType:
    """Returns a program beside the package, for example in tools/, as a module without running it."""
    spec = importlib.util.spec_from_file_location(f"tested_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module
