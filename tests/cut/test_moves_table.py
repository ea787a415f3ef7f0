"""Small programs move what moves_table.txt says: what has become dearer, or cheaper, is seen there."""

from __future__ import annotations

import pytest
from cut.moves_table import FILE, PROGRAMS, line

EXPECTED = {each.partition(":")[0]: each for each in FILE.read_text().splitlines()}


@pytest.mark.parametrize("name", PROGRAMS)
def test_program_moves_what_the_table_says(name: str) -> None:
    assert line(name) == EXPECTED[name], "if this is meant, write the table again: tests/cut/moves_table.py"
