"""Cut random programs equal one process. A failure shows the seed and the program."""

from __future__ import annotations

import pytest
from cut.drawn import control_flow, lines, more_lines, programs
from cut.drawn.agreement import assert_all_agree, disagreement

PLAIN = (lines.LINES, more_lines.LINES)
NESTED = (lines.LINES, more_lines.LINES, control_flow.LINES, control_flow.LINES)


def _plain(seed: int) -> str | None:
    return disagreement(programs.draw(seed, PLAIN, open_extents=seed % 5 == 4), size=2 + seed // 2 % 2)


def _nested(seed: int) -> str | None:
    batches = ((4, 7, 2, 5)[seed // 4 % 4],) if seed % 2 == 0 else (5, 2)
    return disagreement(programs.draw(seed, NESTED, lines=3, batches=batches), size=2 + seed // 2 % 2)


def test_random_programs_equal_one_process() -> None:
    assert_all_agree(_plain, range(10))


def test_nested_programs_equal_one_process() -> None:
    assert_all_agree(_nested, range(2))


@pytest.mark.long
@pytest.mark.parametrize("first", range(0, 10000, 500))
def test_ten_thousand_random_programs_equal_one_process(first: int) -> None:
    assert_all_agree(_plain, range(first, first + 500))


@pytest.mark.long
@pytest.mark.parametrize("first", range(0, 2000, 100))
def test_two_thousand_nested_programs_equal_one_process(first: int) -> None:
    assert_all_agree(_nested, range(first, first + 100))
