"""The way through the house: which part may import which, and where foreign private interfaces may be touched."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# A module may import from its own layer and from those above it in this list.
LAYERS = [
    ("keras_ddl.errors", "keras_ddl._durable"),
    ("keras_ddl.config", "keras_ddl._environment", "keras_ddl._error_report", "keras_ddl._tf_packages"),
    ("keras_ddl._whereabouts",),
    ("keras_ddl.cost_model",),
    ("keras_ddl.topology",),
    ("keras_ddl._native", "keras_ddl._mpi"),
    ("keras_ddl._timeline_recording",),
    ("keras_ddl.group",),
    ("keras_ddl.communicator", "keras_ddl.timeline"),
    ("keras_ddl.launch",),
    ("keras_ddl._tf_compat",),
    ("keras_ddl._op_arguments", "keras_ddl._op_errors", "keras_ddl._op_names", "keras_ddl._variables"),
    ("keras_ddl._raw_ops",),
    ("keras_ddl.ops", "keras_ddl.ops_gradients"),
    ("keras_ddl.bucket", "keras_ddl.data"),
    ("keras_ddl._keras_compat",),
    ("keras_ddl.strategy_extended", "keras_ddl.strategy_share"),
    ("keras_ddl.strategy_agreement",),
    ("keras_ddl._keras_patches",),
    ("keras_ddl.strategy",),
    ("keras_ddl.schedules",),
    ("keras_ddl.checkpoint", "keras_ddl.model_state", "keras_ddl._tensor_bundle"),
    ("keras_ddl.export",),
    ("keras_ddl.callbacks",),
    ("keras_ddl.cli",),
]


def python_modules() -> dict[str, Path]:
    modules = {}
    for folder, package in ((ROOT / "keras_ddl", "keras_ddl"), (ROOT / "export", "keras_ddl.export")):
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            name = ".".join((package, *(p for p in parts if p != "__init__")))
            modules[name] = path
    return modules


MODULES = python_modules()


def layer_of(module: str) -> int | None:
    """The longest listed prefix decides, so that `keras_ddl._keras_patches` and its submodules share a layer."""
    best = None
    length = -1
    for index, prefixes in enumerate(LAYERS):
        for prefix in prefixes:
            matches = module == prefix or module.startswith((prefix + ".", prefix + "_"))
            if matches and len(prefix) > length:
                best, length = index, len(prefix)
    return best


def imports_of(name: str, path: Path) -> set[str]:
    """Absolute names of the keras_ddl modules that `path` imports, wherever the import stands (not for typing only)."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for inner in ast.walk(node)
    }
    found = set()
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
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
        if target and target != "keras_ddl":
            resolved.add(target)
    return resolved - {name}


def test_layers_cover_every_module() -> None:
    lost = [name for name in MODULES if name != "keras_ddl" and layer_of(name) is None]
    assert lost == [], "give these modules a place in LAYERS"


@pytest.mark.parametrize("name", sorted(set(MODULES) - {"keras_ddl"}))
def test_imports_point_left(name: str) -> None:
    wrong = [t for t in imports_of(name, MODULES[name]) if layer_of(t) > layer_of(name)]
    assert wrong == [], f"{name} imports from a later layer"


def test_no_circle_of_imports() -> None:
    # Imports inside functions count too: they only put a circle off. Left out are the package itself, whose names are
    # imported on first use, and that importing a submodule also runs its package's __init__, which imports its parts.
    waiting = {name: imports_of(name, path) for name, path in MODULES.items() if name != "keras_ddl"}
    while free := [name for name, targets in waiting.items() if not targets & waiting.keys()]:
        for name in free:
            del waiting[name]
    circles = {name: sorted(targets & waiting.keys()) for name, targets in waiting.items()}
    assert circles == {}, "these modules import one another, or modules that do"


@pytest.mark.parametrize(
    ("pattern", "home"),
    [
        # The launcher's wrapper asks the kernel (prctl) to outlive nobody, and is too light for the native library.
        (r"^\s*(import|from) ctypes", {"keras_ddl._native", "keras_ddl.launch.processes"}),
        (r"^\s*(import|from) tensorflow\.python|tf\.python\b", {"keras_ddl._tf_compat"}),
        (r"^\s*(import|from) keras\.src", {"keras_ddl._keras_compat"}),
    ],
)
def test_private_interfaces_have_one_home(pattern: str, home: set[str]) -> None:
    users = {n for n, p in MODULES.items() if re.search(pattern, p.read_text(encoding="utf-8"), re.MULTILINE)}
    strangers = {u for u in users if not any(u == h or u.startswith((h + ".", h + "_")) for h in home)}
    assert strangers == set()


@pytest.mark.parametrize(
    ("folder", "forbidden"),
    [
        ("core", r'#include\s*[<"](mpi|tensorflow|Python|tf_)'),
        ("mpi", r'#include\s*[<"](tensorflow|Python|tf_)'),
        ("tf", r'#include\s*[<"](mpi|Python)'),
    ],
)
def test_native_layers_stay_apart(folder: str, forbidden: str) -> None:
    sources = [p for p in (ROOT / "native" / folder).rglob("*") if p.suffix in {".cc", ".h"}]
    assert sources, "the folder moved: change this test"
    guilty = [str(p) for p in sources if re.search(forbidden, p.read_text(encoding="utf-8"))]
    assert guilty == []
