"""Operations are placed as placement_table.txt says: what has become dearer, or cheaper, is seen there."""

from __future__ import annotations

import pytest
from cut.placement_table import FILE, lines, topics

TOPICS = topics()

EXPECTED = {
    topic: rest.strip().splitlines()
    for topic, _, rest in (part.partition("\n") for part in FILE.read_text().split("\n# ")[1:])
}


@pytest.mark.parametrize("topic", TOPICS)
def test_results_are_placed_as_the_table_says(topic: str) -> None:
    found = lines(TOPICS[topic])
    new, gone = (sorted(set(a) - set(b)) for a, b in ((found, EXPECTED[topic]), (EXPECTED[topic], found)))
    assert not new and not gone, "\n".join(
        ["if this is meant, write the table again: tests/cut/placement_table.py", *new, "instead of", *gone]
    )
