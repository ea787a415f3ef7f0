"""Pages *-names.md of Horovod and DDL: every name has a check that tries it, and the page says what the checks say."""

from __future__ import annotations

import pytest

from harness.name_tables import ROOT, TABLES, Table, uses

EACH = pytest.mark.parametrize("table", TABLES, ids=lambda table: table.page.stem)


@EACH
def test_name_tables_are_what_the_checks_say(table: Table) -> None:
    page = table.page.relative_to(ROOT)
    assert table.page.read_text(encoding="utf-8") == table.text(), (
        f"{page} is not what its rows give. Run `python tests/harness/name_tables.py`."
    )


@EACH
def test_every_name_has_a_row(table: Table) -> None:
    assert not [name for name in table.names() if table.row_of(name) is None], "names without a check"


@EACH
def test_every_row_is_of_a_name_and_its_check_uses_it(table: Table) -> None:
    names = table.names()
    for row in table.rows().values():
        assert row.base in names, f"{row.name} is no name of {table.data.name}"
        parameters = [*row.by_keyword, *([row.name[:-1].partition("(")[2]] if "(" in row.name else [])]
        assert set(parameters) <= set(names[row.base] or ()), f"{row.name} has no such parameter: {parameters}"
        assert uses(row), f"the check of {row.name} does not use it"


@EACH
def test_refused_rows_say_why_and_better_ones_how(table: Table) -> None:
    rows = list(table.rows().values())
    # A row without a reason stands right below the one that gives it, whose check it shares.
    for above, row in zip(rows, rows[1:]):
        assert row.verdict == "works" or row.note or above.source == row.source, row.name
