"""Reads the project's sources once: Python modules and their imports, native sources, pages."""

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
    """A line that breaks a rule; `text` names the rule and the problem."""

    path: Path
    line: int
    text: str


class Project:
    """A checkout of the project, or the part of one that a test makes."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @functools.cached_property
    def modules(self) -> dict[str, Path]:
        """The modules of keras_ddl by their installed name: export/ is keras_ddl.export."""
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
        folders = ["keras_ddl", "native", "integrations", "observe", *FOLDERS.values()]
        readmes = {path for folder in folders for path in (self.root / folder).rglob("README.md")}
        pages = [path for folder in FOLDERS.values() for path in (self.root / folder / "docs").glob("*.md")]
        own = [self.root / "README.md", *sorted((self.root / "docs").rglob("*.md"))]
        return [path for path in (*own, *sorted(pages), *sorted(readmes)) if path.exists()]

    @functools.cached_property
    def beside(self) -> list[Path]:
        """The pages beside the benchmarks and the examples."""
        return [*self.root.glob("benchmarks/results/*.md"), *self.root.glob("examples/*/README.md")]

    def is_in_missing_part(self, path: Path) -> bool:
        """Whether a path lies in a part that this checkout lacks. Pages may link to such paths."""
        inside = os.path.normpath(path)
        missing = [self.root / folder for folder in FOLDERS.values() if not (self.root / folder).is_dir()]
        return any(inside.startswith(f"{folder}{os.sep}") for folder in missing)

    @functools.cached_property
    def tracked(self) -> list[Path]:
        """The files that git tracks, or all files if there is no repository."""
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
        """Returns keras_ddl module -> line for all imports of a module, including those in functions or for typing."""
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
        """Yields (line, match) for a pattern in a file."""
        text = self.text(path)
        for match in re.finditer(pattern, text, 0 if isinstance(pattern, re.Pattern) else re.MULTILINE):
            yield text.count("\n", 0, match.start()) + 1, match


def imported(tree: ast.Module, package: str = "") -> Iterator[tuple[str, int]]:
    """Yields (name, line) of each import; `from a import b` gives a.b. `package`: for relative imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                base = ".".join(parents[: len(parents) - node.level + 1] + ([base] if base else []))
            yield from ((f"{base}.{alias.name}", node.lineno) for alias in node.names)


def cycles(targets_of: dict[str, set[str]]) -> dict[str, set[str]]:
    """Returns the part of `targets_of` (name -> names that it needs) that is in a cycle, or needs a cycle."""
    waiting = dict(targets_of)
    while free := [name for name, targets in waiting.items() if not targets & waiting.keys()]:
        for name in free:
            del waiting[name]
    return {name: targets & waiting.keys() for name, targets in waiting.items()}


Rule = Callable[[Project], Iterator[Finding]]
