"""Random programs, cut, against one process. A failure shows the seed and the program: print(programs.draw(seed))."""

from __future__ import annotations

import numpy as np
import pytest
from cut import programs
from cut.comparing import difference
from cut.together import Together


def _disagreement(seed: int) -> str | None:
    """Returns what a program gives that one process does not; None if there is nothing."""
    program = programs.draw(seed)
    size = 2 + seed // 2 % 2
    wholes = programs.wholes(seed)
    batches = [programs.arguments(seed, rows) for rows in program.batches]
    try:
        together = Together(program, batches[0], wholes, sizes=[size], static=program.static)
    except Exception as error:
        return f"{type(error).__name__}: {error}\n{program}"
    try:
        for given in batches:
            expected = together.expected(given, wholes)
            for rank, found in enumerate(together.of_ranks(size, given, wholes)):
                told = difference(found, expected)
                if told is not None and not _is_unstable(together, given, wholes):
                    return f"rank {rank} of {size}, {len(given[0])} rows: {told}\n{program}"
    except Exception as error:
        return f"{type(error).__name__}: {error}\n{program}"
    finally:
        together.close()
    return None


def _is_unstable(together: Together, given: list[np.ndarray], wholes: list[np.ndarray]) -> bool:
    """Whether one process itself gives something else for arguments that differ in the last bits."""
    expected = together.expected(given, wholes)
    rng = np.random.default_rng(0)
    for _ in range(8):
        near = [each * (1 + 2e-15 * rng.normal(size=each.shape)) if each.dtype.kind == "f" else each for each in given]
        if difference(together.expected(near, wholes), expected) is not None:
            return True
    return False


@pytest.mark.parametrize("first", range(0, 100, 20))
def test_random_programs_equal_one_process(first: int) -> None:
    for seed in range(first, first + 20):
        told = _disagreement(seed)
        assert told is None, told


@pytest.mark.long
@pytest.mark.parametrize("first", range(1000, 11000, 500))
def test_ten_thousand_random_programs_equal_one_process(first: int) -> None:
    for seed in range(first, first + 500):
        told = _disagreement(seed)
        assert told is None, told
