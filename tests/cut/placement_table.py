"""How the cut places what operations give: a table, and the program that writes it.

Its cases are those of test_specs.py and rule_cases.py.

    PYTHONPATH=tests python tests/cut/placement_table.py   # writes placement_table.txt; read what git shows as changed

A line is one of some types of operations, with operands and attributes as in `Case`. It gives placements of the
operands and, after ">", of the results. R: replicated. S1: sharded along axis 1; 2S0: in two blocks; S0*2: in units of
two. P: a part of a sum; Pmax: of a maximum. -0: operand 0 is gathered or combined before. "open" begins what differs
where the number of rows is not known when the step is traced; the extents of the results are those known then.
"unranked" begins what becomes of parts of operands whose rank is not known.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from keras_ddl.compat.tensorflow import tf

tf.config.threading.set_inter_op_parallelism_threads(32)  # as conftest.py

from cut.counting import Moved, NoRanks  # noqa: E402
from cut.placements import Case, Ranks, Traced  # noqa: E402

from keras_ddl.cut import Batch, Program  # noqa: E402
from keras_ddl.cut.analysis.dims import dim, if_certain  # noqa: E402
from keras_ddl.cut.analysis.extents import Dims  # noqa: E402
from keras_ddl.cut.analysis.placements import PARTIAL, REPLICATED, Partial, Placement, Sharded  # noqa: E402
from keras_ddl.cut.building.builder import Builder  # noqa: E402

ROWS = 7  # no other extent of the cases, nor one of a product of them
FILE = Path(__file__).with_suffix(".txt")
_MOST = 6  # placements of several operands at once


def lines(cases: Iterable[Case]) -> list[str]:
    """Returns the lines of the table for some cases: types of equal lines together."""
    types: dict[str, list[str]] = {}
    for case in cases:
        of_types = types.setdefault(line(case), [])
        if case.type not in of_types:
            of_types.append(case.type)
    return [f"{' '.join(each)}: {rest}" for rest, each in types.items()]


def line(case: Case) -> str:
    """Returns what the table says of a case, after its type."""
    operands = ", ".join(each if isinstance(each, str) else _constant(each) for each in case.operands)
    attrs = "".join(f" {name}={getattr(each, 'name', each)}" for name, each in case.attrs.items())
    known, open_ones = (Traced(case, Ranks(2, ROWS, static), np.random.default_rng(0)) for static in (True, False))
    outcomes, extents = [_outcome(known, each)[0] for each in _combinations(known)], "nothing"
    differing = []
    for placements, outcome in zip(_combinations(known), outcomes):
        other, extents = _outcome(open_ones, placements)
        differing += [other] if other != outcome else []
    unranked = _unranked(case)
    return f"{operands}{attrs} | {' '.join(outcomes)} | {' '.join(['open', extents, *differing])} | {unranked}"


def _unranked(case: Case) -> str:
    """Returns what becomes of parts of operands whose rank is not known."""
    try:
        traced = Traced(case, Ranks(2, ROWS, False), np.random.default_rng(0), has_ranks=False)
    except (ValueError, TypeError):
        return "needs ranks"
    count = len(traced.arrays)
    parts = [at for at in range(count) if traced.kinds[at] in "fphis"]
    placed = [[PARTIAL if at == part else REPLICATED for at in range(count)] for part in (None, *parts)]
    return " ".join(["unranked", *(_outcome(traced, each)[0] for each in placed)])


def _constant(value: Any) -> str:
    array = np.asarray(value(ROWS) if callable(value) else value)
    return str(array.tolist()).replace(" ", "") if array.size <= 4 else f"constant{[*array.shape]}"


def _combinations(traced: Traced) -> list[tuple[Placement, ...]]:
    """Returns placements of the operands: each one by itself first, then some of several."""
    every = itertools.product(*(traced.placements(index) for index in range(len(traced.arrays))))
    by_count: list[list[tuple[Placement, ...]]] = [[] for _ in range(len(traced.arrays) + 1)]
    for each in every:
        placed = [placement for placement in each if placement != REPLICATED]
        if len(placed) == 1 or Partial("max") not in placed:
            by_count[len(placed)].append(each)
    several = list(itertools.chain(*by_count[2:]))
    return by_count[1] + several[:: max(1, -(-len(several) // _MOST))]


def _outcome(traced: Traced, placements: Sequence[Placement]) -> tuple[str, str]:
    """Returns the placements before and after an operation, and the extents of the results."""
    report = Moved()
    with tf.Graph().as_default():
        program, counts = Program(traced.graph), (ROWS, 4, 0)
        is_static = traced.ranks.static
        batch = Batch(*(each if is_static else tf.compat.v1.placeholder(tf.int64, []) for each in counts))
        b = Builder(program=program, batch=batch, collectives=NoRanks(), everyone=NoRanks(), report=report)
        for value, placement, letters in zip(program.inputs, placements, traced.letters):
            local = b.static_local_shape(value.shape, placement) if isinstance(placement, Sharded) else value.shape
            dims = tuple(b.rows * ("nm".index(each) + 1) if each in "nm" else dim(int(each)) for each in letters)
            local = tf.compat.v1.placeholder(value.dtype, local)
            b.place(value, local, placement, dims if value.rank is not None else None)
        b.build({})
        moved = "".join(f"-{at}" for at, each in enumerate(program.inputs) if each in report.values)
        results = ",".join(_word(b.placement(each)) for each in program.outputs)
        extents = ",".join(_extents(if_certain(b.dims, each)) for each in program.outputs)
    return f"{','.join(map(_word, placements))}>{results}{moved}", extents


def _extents(dims: Dims | None) -> str:
    """Returns extents in words; "?" is one that only its tensor tells."""
    if dims is None:
        return "unknown"
    return f"[{','.join('?' if 'extent(' in str(each) else str(each) for each in dims)}]".replace(" ", "")


def _word(placement: Placement) -> str:
    if isinstance(placement, Partial):
        return "P" if placement.op == "sum" else f"P{placement.op}"
    if not isinstance(placement, Sharded):
        return "R"
    blocks, unit = ("" if each == 1 else each for each in (placement.blocks, placement.unit))
    return f"{blocks}S{placement.axis}{f'*{unit}' if unit else ''}"


def topics() -> dict[str, list[Case]]:
    from cut import rule_cases, test_specs

    return {**test_specs.TOPICS, **rule_cases.TOPICS}


def main() -> None:
    FILE.write_text("".join(f"\n# {topic}\n" + "\n".join(lines(cases)) + "\n" for topic, cases in topics().items()))


if __name__ == "__main__":
    main()
