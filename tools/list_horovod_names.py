"""Writes tests/horovod/horovod_names.json: the public names of Horovod's TensorFlow and Keras modules.

    python tools/list_horovod_names.py FOLDER   # of Horovod's source distribution, unpacked

Read from the source, as Horovod need not be installed. Facts only: names and the names of their parameters, in their
order; null for what takes none because it is no function; "module.name" for what a module has from another one of the
list. Methods count, those of what DistributedOptimizer and DistributedGradientTape return, too; not the hooks that
Keras and TensorFlow call (`on_epoch_end`).
"""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path
from typing import Any

OUTPUT = Path(__file__).resolve().parents[1] / "tests" / "horovod" / "horovod_names.json"
MODULES = (
    "horovod",
    "horovod.tensorflow",
    "horovod.tensorflow.compression",
    "horovod.tensorflow.elastic",
    "horovod.tensorflow.keras",
    "horovod.tensorflow.keras.callbacks",
    "horovod.tensorflow.keras.elastic",
    "horovod.keras",
    "horovod.keras.callbacks",
    "horovod.keras.elastic",
)
# What these functions return is made of a class inside.
RETURNED = {
    ("horovod.tensorflow.keras", "DistributedOptimizer"): ("horovod._keras", "_DistributedOptimizer"),
    ("horovod.tensorflow", "DistributedGradientTape"): ("horovod.tensorflow", "_DistributedGradientTape"),
}
HOOKS = {"on_train_begin", "on_epoch_begin", "on_epoch_end", "on_batch_begin", "on_batch_end", "call", "begin"}
HOOKS |= {"after_create_session"}


class Source:
    """The modules of a source tree, parsed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._trees: dict[str, ast.Module | None] = {}

    def tree(self, module: str) -> ast.Module | None:
        if module not in self._trees:
            base = self._folder.joinpath(*module.split("."))
            files = [path for path in (base / "__init__.py", base.with_suffix(".py")) if path.exists()]
            self._trees[module] = ast.parse(files[0].read_text(encoding="utf-8")) if files else None
        return self._trees[module]

    def names(self, module: str) -> dict[str, Any]:
        """Name -> where it is bound: the definition, or ("module", "name") of an import."""
        found: dict[str, Any] = {}
        for node in _statements(self.tree(module).body):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found[node.name] = node
            elif isinstance(node, ast.Assign):
                found.update({each.id: node.value for each in node.targets if isinstance(each, ast.Name)})
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("horovod"):
                found.update({each.asname or each.name: (node.module, each.name) for each in node.names})
        return found

    def definition(self, module: str, name: str) -> tuple[str, Any]:
        """Follows imports and second names. Returns (module, node); node None: a module, or not to be seen."""
        bound = self.names(module).get(name)
        if isinstance(bound, tuple):
            if self.tree(".".join(bound)) is not None:
                return ".".join(bound), None
            return self.definition(*bound)
        if isinstance(bound, ast.Name):
            return self.definition(module, bound.id)
        if isinstance(bound, ast.Attribute) and ast.unparse(bound.value) == "_basics":
            basics = self.definition("horovod.common.basics", "HorovodBasics")[1]
            methods = {each.name: each for each in basics.body if isinstance(each, ast.FunctionDef)}
            return "horovod.common.basics", methods.get(bound.attr)
        return module, bound

    def class_inside(self, module: str, name: str) -> ast.ClassDef:
        (found,) = [x for x in ast.walk(self.tree(module)) if isinstance(x, ast.ClassDef) and x.name == name][:1]
        return found


def _statements(body: list[ast.stmt]) -> list[ast.stmt]:
    """Those of a module, also inside of `if` and `try`."""
    found = []
    for node in body:
        if isinstance(node, (ast.If, ast.Try)):
            handlers = [each for handler in getattr(node, "handlers", []) for each in handler.body]
            found += _statements([*node.body, *node.orelse, *handlers])
        else:
            found.append(node)
    return found


def parameters(node: ast.FunctionDef) -> list[str]:
    arguments = node.args
    return [each.arg for each in [*arguments.args, *arguments.kwonlyargs] if each.arg != "self"]


def members(source: Source, module: str, node: ast.ClassDef) -> dict[str, ast.AST]:
    """Public methods and attributes of a class and of its bases that are Horovod's, as they are defined."""
    found: dict[str, ast.AST] = {}
    for base in reversed(node.bases):
        text = ast.unparse(base)
        owner, _, name = text.rpartition(".")
        where = source.names(module).get(owner, (module,)) if owner else (module,)
        if isinstance(where, tuple):
            home, inherited = source.definition(".".join(where), name)
            if isinstance(inherited, ast.ClassDef):
                found.update(members(source, home, inherited))
    for each in _statements(node.body):
        if isinstance(each, ast.FunctionDef) and (each.name == "__init__" or not each.name.startswith("_")):
            if each.name not in HOOKS:
                found[each.name] = each
        elif isinstance(each, ast.Assign):
            found.update({t.id: each for t in each.targets if isinstance(t, ast.Name) and not t.id.startswith("_")})
    return found


def listed(source: Source, module: str) -> dict[str, Any]:
    result: dict[str, Any] = {}
    above = MODULES[: MODULES.index(module)]
    for name in public(source, module):
        home, node = source.definition(module, name)
        bound = source.names(module)[name]
        if node is None and home.endswith(f".{name}"):
            result[name] = home  # a module
        elif isinstance(bound, tuple) and bound[0] in above:
            result[name] = ".".join(bound)
        elif origin := _listed_before(source, above, home, node):
            result[name] = origin
        elif isinstance(node, ast.ClassDef):
            result |= _with_members(module, name, members(source, home, node))
        elif isinstance(node, ast.FunctionDef):
            basics = source.definition("horovod.common.basics", "HorovodBasics")[1]
            methods = {each.name: each for each in basics.body if isinstance(each, ast.FunctionDef)}
            result[name] = parameters(methods[name] if node.args.vararg and name in methods else node)
        else:
            result[name] = None
        if (module, name) in RETURNED:
            home, inside = RETURNED[module, name]
            found = _with_members(module, name, members(source, home, source.class_inside(home, inside)))
            del found[name]
            result |= found
    return result


def public(source: Source, module: str) -> list[str]:
    """What `__all__` says, or every name without an underscore that is Horovod's."""
    names = source.names(module)
    if "__all__" in names:
        return ast.literal_eval(names["__all__"])
    return [name for name in names if not name.startswith("_") or name == "__version__"]


# Definitions of members that were listed -> the name that they were listed with.
_listed_members: dict[int, str] = {}


def _with_members(module: str, name: str, found: dict[str, ast.AST]) -> dict[str, list[str] | str | None]:
    init = found.pop("__init__", None)
    result: dict[str, list[str] | str | None] = {name: parameters(init) if init is not None else []}
    for member, node in found.items():
        takes = parameters(node) if isinstance(node, ast.FunctionDef) else None
        result[f"{name}.{member}"] = _listed_members.get(id(node), takes)
        _listed_members.setdefault(id(node), f"{module}.{name}.{member}")
    return result


def _listed_before(source: Source, modules: tuple[str, ...], home: str, node: Any) -> str | None:
    for module in modules if node is not None else ():
        for name in source.names(module):
            if not name.startswith("_") and source.definition(module, name) == (home, node):
                return f"{module}.{name}"
    return None


def main() -> None:
    folder = Path(sys.argv[1])
    source = Source(folder)
    version = re.search(r"__version__ = '(.+)'", (folder / "horovod" / "__init__.py").read_text())[1]
    names = {module: listed(source, module) for module in MODULES}
    lines = [
        f"  {json.dumps(module)}: {{\n"
        + ",\n".join(f"    {json.dumps(name)}: {json.dumps(takes)}" for name, takes in found.items())
        + "\n  }"
        for module, found in names.items()
    ]
    OUTPUT.write_text("{\n" + f'  "version": {json.dumps(version)},\n' + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
