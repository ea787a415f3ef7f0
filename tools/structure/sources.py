"""The project's sources, read once: the Python modules, what they import, the native sources, the pages."""

from __future__ import annotations

import ast
import functools
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from keras_ddl.parts import FOLDERS

ROOT = Path(__file__).resolve().parents[2]


class Finding(NamedTuple):
    """A line that breaks a rule; `text` says which rule, and how."""

    path: Path
    line: int
    text: str


class Project:
    """A checkout of the project, or as much of one as a test makes."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @functools.cached_property
    def modules(self) -> dict[str, Path]:
        """The modules of keras_ddl by name, as they are installed: export/ is keras_ddl.export."""
        found = {}
        folders = {"keras_ddl": "keras_ddl"} | {f"keras_ddl.{name}": folder for name, folder in FOLDERS.items()}
        for package, folder in folders.items():
            for path in sorted((self.root / folder).rglob("*.py")):
                words = path.relative_to(self.root / folder).with_suffix("").parts
                if words[0] not in ("tests", "top_level"):
                    found[".".join((package, *(word for word in words if word != "__init__")))] = path
        return found

    @functools.cached_property
    def pages(self) -> list[Path]:
        """The READMEs of the project and its folders, and the pages of docs/ and of parts."""
        folders = ["keras_ddl", "integrations", "observe", *FOLDERS.values()]
        readmes = {path for folder in folders for path in (self.root / folder).rglob("README.md")}
        pages = [path for folder in FOLDERS.values() for path in (self.root / folder / "docs").glob("*.md")]
        own = [self.root / "README.md", *sorted((self.root / "docs").rglob("*.md"))]
        return [path for path in (*own, *sorted(pages), *sorted(readmes)) if path.exists()]

    @functools.cached_property
    def beside(self) -> list[Path]:
        """The figures beside the benchmarks, and the walk-throughs beside the examples."""
        return [*self.root.glob("benchmarks/results/*.md"), *self.root.glob("examples/*/README.md")]

    def is_in_missing_part(self, path: Path) -> bool:
        """Whether a path lies in the folder of a part that this checkout does not have: pages may lead there."""
        inside = os.path.normpath(path)
        missing = [self.root / folder for folder in FOLDERS.values() if not (self.root / folder).is_dir()]
        return any(inside.startswith(f"{folder}{os.sep}") for folder in missing)

    @functools.cached_property
    def tracked(self) -> list[Path]:
        """The files that git knows; all files where there is no repository."""
        if not (self.root / ".git").exists():
            return [path for path in sorted(self.root.rglob("*")) if path.is_file()]
        listed = subprocess.run(["git", "ls-files"], cwd=self.root, capture_output=True, text=True, check=True).stdout
        return [path for line in listed.splitlines() if (path := self.root / line).exists()]

    @functools.cache  # noqa: B019 - there is one project in a process, or a few in tests
    def text(self, path: Path) -> str:
        return path.read_text(encoding="utf-8")

    @functools.cache  # noqa: B019
    def tree(self, path: Path) -> ast.Module:
        return ast.parse(self.text(path))

    @functools.cache  # noqa: B019
    def imports_of(self, name: str) -> dict[str, int]:
        """The keras_ddl modules that a module imports, wherever the import stands, for typing only included; lines."""
        path = self.modules[name]
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        found: dict[str, int] = {}
        for target, line in imported(self.tree(path), package):
            while target and target not in self.modules:
                target = target.rpartition(".")[0]
            if target and target != name:
                found.setdefault(target, line)
        return found

    def matches(self, path: Path, pattern: str | re.Pattern[str]) -> Iterator[tuple[int, re.Match[str]]]:
        """The matches of a pattern in a file, with their lines."""
        text = self.text(path)
        for match in re.finditer(pattern, text, 0 if isinstance(pattern, re.Pattern) else re.MULTILINE):
            yield text.count("\n", 0, match.start()) + 1, match


def imported(tree: ast.Module, package: str = "") -> Iterator[tuple[str, int]]:
    """(name, line) of all that a module imports; `from a import b` gives a.b. `package`: for relative imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                base = ".".join(parents[: len(parents) - node.level + 1] + ([base] if base else []))
            yield from ((f"{base}.{alias.name}", node.lineno) for alias in node.names)


def circles(targets_of: dict[str, set[str]]) -> dict[str, set[str]]:
    """Those of `targets_of` (name -> names that it needs) that need one another, or need some that do."""
    waiting = dict(targets_of)
    while free := [name for name, targets in waiting.items() if not targets & waiting.keys()]:
        for name in free:
            del waiting[name]
    return {name: targets & waiting.keys() for name, targets in waiting.items()}


Rule = Callable[[Project], Iterator[Finding]]
