"""Operations are placed as placement_table.txt says; its diff shows what became more or less expensive."""

from __future__ import annotations

import pytest
from cut.placement_table import FILE, line, topics

TOPICS = topics()


def _table() -> dict[str, dict[str, list[str]]]:
    """Returns {topic: {line: types of operations}}."""
    found: dict[str, dict[str, list[str]]] = {}
    for part in FILE.read_text().split("\n# ")[1:]:
        topic, *lines = part.strip().splitlines()
        found[topic] = {rest: types.split() for types, _, rest in (each.partition(": ") for each in lines)}
    return found


EXPECTED = _table()


@pytest.mark.parametrize("step", [20, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("topic", TOPICS)
def test_results_are_placed_as_the_table_says(topic: str, step: int) -> None:
    for case in TOPICS[topic][::step]:
        found = line(case)
        assert case.type in EXPECTED[topic].get(found, []), (
            f"if this is intended, rewrite the table (tests/cut/placement_table.py): {case.type}: {found}"
        )


def test_the_table_has_no_other_types() -> None:
    types = {topic: {case.type for case in cases} for topic, cases in TOPICS.items()}
    assert types == {topic: {each for line in lines.values() for each in line} for topic, lines in EXPECTED.items()}
