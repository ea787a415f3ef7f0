"""Checks what tests import, and that tables of names agree with their checks."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .sources import ROOT, Finding, Project


def tests_do_not_import_benchmarks(project: Project) -> Iterator[Finding]:
    """Only the tests of benchmarks import or load files of benchmarks/; shared code lies in tools/."""
    folder = project.root / "benchmarks"
    programs = {path.stem for path in folder.glob("*.py")} | {"benchmarks"}
    for path in sorted((project.root / "tests").rglob("*.py")):
        parts = path.relative_to(project.root).parts
        if parts[1:3] == ("project", "benchmarks"):
            continue
        beside = {each.stem for each in path.parent.glob("*.py")}
        for line, match in project.matches(path, r"^\s*(?:from|import) (\w+)"):
            first = match[1]
            if first in programs - beside - sys.stdlib_module_names and not (ROOT / "keras_ddl" / first).exists():
                yield Finding(path, line, f"imports {first} from benchmarks/")
        if parts[1] == "harness":
            for line, match in project.matches(path, r"/ \"benchmarks\"|\"benchmarks/"):
                yield Finding(path, line, f"{match[0]} leads into benchmarks/")


def tables_of_names() -> Sequence[Any]:
    """Returns the tables that tests/harness/name_tables.py reads from the decorators of the checks."""
    if (tests := str(ROOT / "tests")) not in sys.path:
        sys.path.append(tests)
    from harness import name_tables

    return name_tables.TABLES


def name_tables_agree(project: Project, tables: Sequence[Any] | None = None) -> Iterator[Finding]:
    """Pages of names agree with their checks, every name has a check that uses it, and refusals have reasons.

    A row without a reason shares the check and the reason of the row above it.
    """
    if tables is None and project.root != ROOT:
        return
    for table in tables_of_names() if tables is None else tables:
        yield from table_agrees(table)


def table_agrees(table: Any) -> Iterator[Finding]:
    from harness.name_tables import uses

    page: Path = table.page
    names, rows = table.names(), table.rows()
    if page.read_text(encoding="utf-8") != table.text():
        yield Finding(page, 1, "is not what its rows give: run `python tests/harness/name_tables.py`")
    for name in names:
        if table.row_of(name) is None:
            yield Finding(table.data, 1, f"{name} has no check")
    for row in rows.values():
        if row.base not in names:
            yield Finding(table.data, 1, f"{row.name}, which has a check, is no name of this file")
            continue
        parameters = [*row.by_keyword, *([row.name[:-1].partition("(")[2]] if "(" in row.name else [])]
        if not set(parameters) <= set(names[row.base] or ()):
            yield Finding(table.data, 1, f"{row.name} has no such parameter: {parameters}")
        if not uses(row):
            yield Finding(table.data, 1, f"the check of {row.name} does not use it")
    in_order = list(rows.values())
    for above, row in zip(in_order, in_order[1:]):
        if row.verdict != "works" and not row.note and above.source != row.source:
            yield Finding(page, 1, f"{row.name}: {row.verdict}, and the row does not say why or how")


RULES = (tests_do_not_import_benchmarks, name_tables_agree)
