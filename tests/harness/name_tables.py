"""Tables in the docs that say of every public name of another library what became of it here.

    python tests/harness/name_tables.py   # writes the pages

The names stand in a file of data, and each has a row, which is a check that tries it on real ranks:

    @row("shutdown", WORKS, "not collective")
    def check_name_shutdown(): ...

A check may have several rows. What a page says is read from the decorators, without importing anything;
`make lint` fails where page, rows and names do not agree (tools/structure/tests.py).
"""

from __future__ import annotations

import ast
import functools
import json
import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
WORKS, BETTER, REFUSED = "works", "works better", "refused"
NO_BREAK = "\N{NO-BREAK SPACE}"
VERDICTS = {"WORKS": WORKS, "BETTER": BETTER, "REFUSED": REFUSED}


def row(name: str, verdict: str, note: str = "", by_keyword: str = "") -> Callable[[Any], Any]:
    """Says that a check tries `name`, and what comes of it.

    Args:
        name: as in `Table.names`; "name(parameter)" for what a value of a parameter does.
        verdict: WORKS, BETTER or REFUSED.
        note: one line: how, or why. Markdown.
        by_keyword: parameters, separated by spaces, that stand elsewhere in the list here or must be named.
    """
    return lambda check: check


@dataclass(frozen=True)
class Row:
    name: str
    verdict: str
    note: str
    by_keyword: tuple[str, ...]
    source: str  # of the check

    @property
    def base(self) -> str:
        """The name without the parameter."""
        return self.name.partition("(")[0]


@dataclass(frozen=True)
class Section:
    title: str
    prefix: str  # of its names, in rows
    text: str = ""


@dataclass(frozen=True)
class Table:
    """A page, the file with the names, the programs with the checks; section of the file -> section of the page."""

    page: Path
    data: Path
    programs: tuple[Path, ...]
    intro: str
    sections: dict[str, Section]

    def lists(self) -> dict[str, dict[str, Any]]:
        """Section of the file -> name -> its parameters; or, as a string, which other name it is."""
        return {key: found for key, found in json.loads(self.data.read_text()).items() if key in self.sections}

    def version(self) -> str:
        return json.loads(self.data.read_text())["version"]

    def names(self, *sections: str) -> dict[str, list[str] | None]:
        """The names that need a row, of all sections or of these -> their parameters."""
        found: dict[str, list[str] | None] = {}
        for key, names in self.lists().items():
            for name, takes in names.items() if not sections or key in sections else ():
                if not isinstance(takes, str):
                    found.setdefault(self.sections[key].prefix + name, takes)
        return found

    def rows(self) -> dict[str, Row]:
        return _rows(self.programs)

    def row_of(self, name: str) -> Row | None:
        """Returns the row of a name. What a refused class has is refused with it."""
        rows = self.rows()
        above = rows.get(name.rpartition(".")[0])
        return rows.get(name) or (above if above is not None and above.verdict == REFUSED else None)

    def text(self) -> str:
        """Returns the page."""
        lines = [self.intro.format(version=self.version()).strip()]
        for title in dict.fromkeys(each.title for each in self.sections.values()):
            sections = {key: each for key, each in self.sections.items() if each.title == title}
            text = next(iter(sections.values())).text
            lines += ["", f"## {title}", "", *([text, ""] if text else [])]
            names = self.names(*sections)
            lines += _lines({each: names[each.base] for each in self.rows().values() if each.base in names})
        return "\n".join(lines) + "\n"


@functools.cache
def _rows(programs: tuple[Path, ...]) -> dict[str, Row]:
    found: dict[str, Row] = {}
    for program in programs:
        text = program.read_text()
        for check in ast.parse(text).body:
            for each in getattr(check, "decorator_list", []):
                if isinstance(each, ast.Call) and ast.unparse(each.func) == "row":
                    assert check.name.startswith(("check_", "test_")), f"{check.name} is not run"
                    made = _row(each, ast.unparse(check))
                    assert made.name not in found, f"{made.name} has two rows"
                    found[made.name] = made
    return found


def _row(call: ast.Call, source: str) -> Row:
    name, verdict, *note = call.args
    keywords = {each.arg: ast.literal_eval(each.value) for each in call.keywords}
    text = ast.literal_eval(note[0]) if note else keywords.get("note", "")
    return Row(
        ast.literal_eval(name),
        VERDICTS[ast.unparse(verdict)],
        text,
        tuple(keywords.get("by_keyword", "").split()),
        source,
    )


def _lines(rows: dict[Row, list[str] | None]) -> list[str]:
    """Returns the lines of a section for rows and the parameters of their names.

    Names that work without a note stand in one sentence, and names with equal notes in one line of the table. Other
    rows without a note share the one above (tools/structure/tests.py checks that).
    """
    plain: list[str] = []
    table: dict[tuple[str, str], list[str]] = {}
    for row, parameters in rows.items():
        name, note = f"`{row.name}`", _note(row, parameters)
        if note or not table:
            last = row.verdict, note
        if row.verdict == WORKS and not note:
            plain.append(name)
        else:
            table.setdefault(last, []).append(name)
    sentence = f"As documented: {', '.join(each.replace(' ', NO_BREAK) for each in plain)}."
    lines = [textwrap.fill(sentence, 120, break_on_hyphens=False).replace(NO_BREAK, " ")] if plain else []
    if table:
        lines += [*([""] if plain else []), "| name | | how, or why not |", "|---|---|---|"]
    return lines + [f"| {', '.join(each)} | {verdict} | {note} |" for (verdict, note), each in table.items()]


def _note(row: Row, parameters: list[str] | None) -> str:
    notes = [row.note] if row.note else []
    if row.by_keyword and list(row.by_keyword) == (parameters or [])[-len(row.by_keyword) :]:
        notes.append(f"from `{row.by_keyword[0]}` on by keyword")
    elif row.by_keyword:
        notes.append(f"by keyword: {', '.join(f'`{each}`' for each in row.by_keyword)}")
    return "; ".join(notes)


def uses(row: Row) -> bool:
    """Whether the check of a row has the name in its body, and the parameter of which it tries a value."""
    body = row.source.partition("\ndef ")[2].partition("\n")[2]
    words = re.findall(r"[\w]+", row.base.rpartition(".")[2])[-1:] + re.findall(r"\((\w+)\)", row.name)
    return all(re.search(rf"\b{re.escape(word)}\b", body) for word in words)


HOROVOD = Table(
    page=ROOT / "integrations" / "horovod" / "docs" / "horovod-names.md",
    data=ROOT / "integrations" / "horovod" / "tests" / "horovod_names.json",
    programs=(
        ROOT / "integrations" / "horovod" / "tests" / "name_checks.py",
        ROOT / "integrations" / "horovod" / "tests" / "name_collective_checks.py",
        ROOT / "integrations" / "horovod" / "tests" / "train_name_checks.py",
        ROOT / "integrations" / "horovod" / "tests" / "elastic_name_checks.py",
        ROOT / "integrations" / "horovod" / "tests" / "test_installation.py",
    ),
    intro="""
# Horovod's names

Every public name of the TensorFlow and Keras modules of Horovod {version}. *Works better*: the note says what
is here in place of a restriction or a defect. *Refused*: an error says what to use. Parameters have Horovod's names and
order; the note says which must be passed by keyword. A check tries each name on 2 ranks, and this page is
[generated from these checks](../../../docs/development.md#tests). The guide: [From Horovod](from-horovod.md).
""",
    sections={
        "horovod": Section("horovod", "horovod."),
        "horovod.tensorflow": Section(
            "horovod.tensorflow", "", "`import keras_ddl.horovod as hvd`, or `import horovod.tensorflow as hvd`."
        ),
        "horovod.tensorflow.compression": Section("horovod.tensorflow.compression", "compression."),
        "horovod.tensorflow.elastic": Section("horovod.tensorflow.elastic", "elastic."),
        "horovod.tensorflow.keras": Section(
            "horovod.tensorflow.keras and horovod.keras",
            "keras.",
            "`import keras_ddl.horovod.keras as hvd` stands for both. It has the names of horovod.tensorflow, too.",
        ),
        "horovod.keras": Section("horovod.tensorflow.keras and horovod.keras", "keras."),
        "horovod.tensorflow.keras.callbacks": Section("callbacks of both", "callbacks."),
        "horovod.keras.callbacks": Section("callbacks of both", "callbacks."),
        "horovod.tensorflow.keras.elastic": Section("elastic of both", "keras.elastic."),
        "horovod.keras.elastic": Section("elastic of both", "keras.elastic."),
    },
)

DDL = Table(
    page=ROOT / "integrations" / "ddl" / "docs" / "ddl-names.md",
    data=ROOT / "integrations" / "ddl" / "tests" / "ddl_names.json",
    programs=(
        ROOT / "integrations" / "ddl" / "tests" / "name_checks.py",
        ROOT / "integrations" / "ddl" / "tests" / "test_ddlrun.py",
    ),
    intro="""
# Names of IBM's DDL

Every name, option and variable of {version}. *Refused* is an error; the note says
what to use. A check tries each name, and this page is [generated from these
checks](../../../docs/development.md#tests). The
guide: [From IBM DDL](from-ddl.md).
""",
    sections={
        "ddl": Section("The module ddl", "ddl."),
        "import": Section("What import ddl changes", ""),
        "DDL_OPTIONS": Section(
            "Options", "DDL_OPTIONS ", "The same words in `ddl.init(...)`. A word that is no option is an error."
        ),
        "environment": Section("Variables", ""),
        "ddlrun": Section("ddlrun", "ddlrun ", "With one dash or two."),
        "older": Section("Older interfaces", ""),
    },
)
TABLES = (HOROVOD, DDL)


def main() -> None:
    for table in TABLES:
        table.page.write_text(table.text(), encoding="utf-8")
        print(f"wrote {table.page.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
