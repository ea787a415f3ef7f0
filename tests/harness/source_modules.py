"""The project's modules and what they import, from their sources."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from keras_ddl import parts

ROOT = Path(__file__).resolve().parents[2]
PARTS = {name: ROOT / folder for name, folder in parts.FOLDERS.items() if (ROOT / folder).is_dir()}


def python_modules() -> dict[str, Path]:
    modules = {}
    folders = {"keras_ddl": ROOT / "keras_ddl"} | {f"keras_ddl.{name}": folder for name, folder in PARTS.items()}
    for package, folder in folders.items():
        for path in sorted(folder.rglob("*.py")):
            words = path.relative_to(folder).with_suffix("").parts
            if words[0] not in ("tests", "top_level"):
                modules[".".join((package, *(each for each in words if each != "__init__")))] = path
    return modules


MODULES = python_modules()


def imports_of(name: str) -> set[str]:
    """Names of the keras_ddl modules that a module imports, wherever the import stands, for typing only included."""
    path = MODULES[name]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                base = ".".join(parents[: len(parents) - node.level + 1] + ([base] if base else []))
            found.update(f"{base}.{alias.name}" for alias in node.names)
    resolved = set()
    for target in found:
        while target and target not in MODULES:
            target = target.rpartition(".")[0]
        if target:
            resolved.add(target)
    return resolved - {name}


def load_program(path: Path) -> ModuleType:
    """Returns a program beside the package (tools/, say) as a module, without running it."""
    spec = importlib.util.spec_from_file_location(f"tested_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module
