"""Compares a cut, randomly drawn program with one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from cut.comparing import difference
from cut.drawn.programs import Program, arguments, wholes
from cut.simulated import Simulation
from cut.together import Together

from keras_ddl.compat.tensorflow import tf

Arrays = Sequence[np.ndarray]
_BRANCHING = {"If", "StatelessIf", "Case", "StatelessCase", "While", "StatelessWhile"}


class NoVerdict(Exception):
    """One process cannot run the program, or its own results change when arguments differ in the last bits."""


def disagreement(program: Program, size: int) -> str | None:
    """Describes how a rank of `size` differs from one process, or returns None.

    Raises: NoVerdict.
    """
    types = program.types()
    if types is None:
        raise NoVerdict
    batches = [arguments(program.seed, rows) for rows in program.batches]
    try:
        compare = _in_threads if types & _BRANCHING else _in_one_graph
        return compare(program, batches, wholes(program.seed), size)
    except NoVerdict:
        raise
    except Exception as error:
        return f"{type(error).__name__}: {error}\n{program}"


def _in_one_graph(program: Program, batches: Sequence[Arrays], wholes: Arrays, size: int) -> str | None:
    together = Together(
        program, batches[0], wholes, sizes=[size], static=program.static, open_extents=program.open_extents
    )
    try:
        return _compare(
            program,
            batches,
            lambda rows: together.expected(rows, wholes),
            lambda rows: together.outputs(size, rows, wholes),
        )
    finally:
        together.close()


def _in_threads(program: Program, batches: Sequence[Arrays], wholes: Arrays, size: int) -> str | None:
    captured = list(map(tf.constant, wholes))
    step = Simulation(lambda *rows: program(*rows, *captured), batches[0], size, static=program.static)
    return _compare(program, batches, lambda rows: step.expected(*rows), lambda rows: step(*rows))


def _compare(
    program: Program,
    batches: Sequence[Arrays],
    expected: Callable[[Arrays], Arrays],
    run_ranks: Callable[[Arrays], Sequence[Arrays]],
) -> str | None:
    for rows in batches:
        try:
            wanted = expected(rows)
        except tf.errors.OpError:  # drawing tried the lines only, and for example a gradient of no rows may fail
            raise NoVerdict from None
        found = run_ranks(rows)
        for rank, each in enumerate(found):
            told = difference(each, wanted)
            if told is not None:
                if is_unstable(expected, rows):
                    raise NoVerdict
                return f"rank {rank} of {len(found)}, {len(rows[0])} rows: {told}\n{program}"
    return None


def is_unstable(expected: Callable[[Arrays], Arrays], rows: Arrays) -> bool:
    """Tells whether one process gives different results for arguments that differ in the last bits."""
    wanted = expected(rows)
    rng = np.random.default_rng(0)
    for _ in range(8):
        near = [each * (1 + 2e-15 * rng.normal(size=each.shape)) if each.dtype.kind == "f" else each for each in rows]
        if difference(expected(near), wanted) is not None:
            return True
    return False


def assert_all_agree(disagrees: Callable[[int], str | None], seeds: range) -> None:
    """Checks one program per seed. At most a few may have no verdict, so that enough is compared."""
    without = []
    for seed in seeds:
        try:
            told = disagrees(seed)
        except NoVerdict:
            without.append(seed)
            continue
        assert told is None, told
    assert len(without) <= 1 + len(seeds) // 6, f"{len(without)} of {len(seeds)} programs have no verdict: {without}"
