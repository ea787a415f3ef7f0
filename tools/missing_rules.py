"""Finds correct placements that the cut does not use, the opposite of tests/cut/test_specs.py.

    PYTHONPATH=tests python tools/missing_rules.py                # all its operations, in some minutes
    PYTHONPATH=tests python tools/missing_rules.py --only Mul --open
    PYTHONPATH=tests python tools/missing_rules.py --zoo detector decoder   # no names: all networks

For each combination of operand placements in which the cut gathers or combines an operand, the program runs the
operation on each rank's own operands. If the ranks' results are the correct result in some placement, the collective
was unnecessary, and the table gets a line. Lines that hold only for finite entries are marked, and are not oversights,
because a step must give inf and NaN where one process does. A few random entries, on ranks that all have rows, are no
proof, so read a line before adding it to a spec.

PyTorch's torch.distributed.tensor._ops.strategy_validation does the same, and calls these lines missing rules.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from keras_ddl.compat.tensorflow import tf

tf.config.threading.set_inter_op_parallelism_threads(32)  # as in conftest.py

from cut.comparing import difference  # noqa: E402
from cut.counting import Moved, NoRanks, report_of  # noqa: E402
from cut.placements import Case, Draw, Ranks, Traced, Trial, entries, shards  # noqa: E402

from keras_ddl.cut.analysis.dims import Dim  # noqa: E402
from keras_ddl.cut.analysis.placements import REPLICATED, Partial, Placement, Sharded  # noqa: E402
from keras_ddl.cut.analysis.program import Node, Value  # noqa: E402
from keras_ddl.cut.analysis.report import Report  # noqa: E402

SETTINGS = (Ranks(2, 5), Ranks(3, 7))  # uneven rows, a number that no other extent of the cases has
_COMBINE = {"sum": np.sum, "max": np.max, "min": np.min, "product": np.prod}
_MOST_PARTS = 2  # operands that may be partial at once
States = tuple[Placement, ...]


@dataclass(frozen=True)
class Missing:
    """Placements of operands in which an operation could run but does not.

    Attributes:
        moved: the operands that the cut gathers or combines.
        sliced: the placements after replicated operands are sliced, which costs nothing.
        results: the correct placements of each result.
        finite: whether this holds only for finite entries.
    """

    type: str
    operands: States
    moved: tuple[int, ...]
    sliced: States
    results: tuple[frozenset[Placement], ...]
    finite: bool

    def cells(self) -> tuple[str, ...]:
        """Returns its cells in the table."""
        operands = ", ".join(map(_word, self.operands))
        if self.sliced != self.operands:
            operands += " as " + ", ".join(map(_word, self.sliced))
        results = "; ".join(" or ".join(sorted(map(_word, each))) for each in self.results)
        moved = ", ".join(str(each) for each in self.moved)
        return operands, results, "finite" if self.finite else "all", moved


def _word(placement: Placement) -> str:
    if isinstance(placement, Partial):
        return f"P({placement.op})"
    if not isinstance(placement, Sharded):
        return "R"
    blocks, unit = placement.blocks.number, placement.unit.number
    return f"S({placement.axis}{f', {blocks} blocks' if blocks != 1 else ''}{f', unit {unit}' if unit != 1 else ''})"


# ---- correct placements


def _draw(likely: float = 0.5, extremes: Sequence[float] = (), is_coarse: bool = False) -> Draw:
    """Returns a function that draws entries.

    Args:
        likely: probability that a boolean is true.
        extremes: entries that occur once among floats. More would make every placement right, as if all were NaN.
        is_coarse: round floats, so that they are often equal.
    """

    def draw(kind: str, shape: list[int], rows: int, rng: np.random.Generator) -> np.ndarray:
        if kind == "b":
            return rng.random(shape) < likely
        array = entries(kind, shape, rows, rng)
        if array.dtype.kind == "f":
            array = np.ceil(array) if is_coarse and kind != "s" else array
            places = rng.choice(array.size, min(len(extremes), array.size), replace=False)
            array.ravel()[places] = extremes[: len(places)]
        return array

    return draw


# likely=0.9 makes `all` often true, and 0.1 makes `any` often false. The first three have only finite entries.
_DRAWS = [_draw(), _draw(likely=0.9), _draw(likely=0.1, is_coarse=True)]
_FINITE = len(_DRAWS)
_DRAWS += [_draw(extremes=each) for each in ([np.inf], [np.nan], [-np.inf, 0.0], [0.0, np.inf, -np.inf])]


class _Right:
    """Computes the correct placements of a case's results for placements of its operands."""

    def __init__(self, case: Case) -> None:
        self._rng = np.random.default_rng(zlib.crc32(repr(case).encode()))
        self._draws: list[_Draw] = []
        self._finite_draws = 0
        for number, (draw, ranks) in enumerate(itertools.product(_DRAWS, SETTINGS)):
            with contextlib.suppress(tf.errors.InvalidArgumentError):  # e.g. a matrix has no inverse
                self._draws.append(_Draw(Traced(case, ranks, self._rng, draw)))
                self._finite_draws += number < _FINITE * len(SETTINGS)
        self._known: dict[States, tuple[frozenset[Placement], ...] | None] = {}
        self._finite: dict[States, bool] = {}

    def results(self, states: States) -> tuple[frozenset[Placement], ...] | None:
        """Returns the correct placements of each result, or None if a result has none."""
        if states not in self._known:
            self._finite[states] = False
            self._known[states] = self._placements_of_draws(states, len(self._draws))
            if self._known[states] is None:
                self._finite[states] = True
                self._known[states] = self._placements_of_draws(states, self._finite_draws)
        return self._known[states]

    def are_finite(self, states: States) -> bool:
        """Whether these results are correct for finite entries only."""
        return self._finite[states]

    def _placements_of_draws(self, states: States, count: int) -> tuple[frozenset[Placement], ...] | None:
        found: tuple[frozenset[Placement], ...] | None = None
        for each in self._draws[:count]:
            found = each.right(states, found, self._rng)
            if found is None:
                return None
        return found


class _Draw:
    """A case with drawn entries, and its results in one process."""

    def __init__(self, traced: Traced) -> None:
        self._traced = traced
        self._expected = [_array(each) for each in traced.of_one_process()]

    def right(
        self, states: States, among: Sequence[frozenset[Placement]] | None, rng: np.random.Generator
    ) -> tuple[frozenset[Placement], ...] | None:
        """Returns the correct placements of each result, among given or all ones, or None if a result has none."""
        ranks = self._traced.ranks
        local = self._results_of_ranks(Trial(self._traced, states, rng).locals)
        if local is None:
            return None
        found = []
        for index, expected in enumerate(self._expected):
            candidates = among[index] if among is not None else _candidates(expected, ranks.rows)
            right = frozenset(p for p in candidates if _is(p, [each[index] for each in local], expected, ranks))
            if not right:
                return None
            found.append(right)
        return tuple(found)

    def _results_of_ranks(self, arrays: list[list[np.ndarray]]) -> list[list[np.ndarray]] | None:
        """Returns the results of each rank, or None if the operation cannot be built from these operands."""
        found = []
        try:
            for operands in zip(*arrays):
                made = self._traced.made(self._traced.in_place(operands, self._traced.ranks.rows))
                found.append([_array(each) for each in made])
        except (tf.errors.OpError, ValueError, TypeError):
            return None
        return found


def _array(tensor: tf.Tensor) -> np.ndarray:
    """Returns the entries, with the largest float (the max of nothing) as inf, because it would hide differences."""
    array = tensor.numpy()
    if not isinstance(array, np.ndarray) or array.dtype.kind != "f":
        return np.asarray(array)
    return np.where(abs(array) == np.finfo(array.dtype).max, np.copysign(np.inf, array), array).astype(array.dtype)


def _candidates(expected: np.ndarray, rows: int) -> Iterator[Placement]:
    yield REPLICATED
    for axis, extent in enumerate(expected.shape):
        if extent and extent % rows == 0:
            yield from {Sharded(axis, Dim(extent // rows)), Sharded(axis, unit=Dim(extent // rows))}
    if expected.dtype.kind in "fiub":
        yield from (Partial(op) for op in _COMBINE if expected.dtype != bool or op in ("max", "min"))


def _is(placement: Placement, local: Sequence[np.ndarray], value: np.ndarray, ranks: Ranks) -> bool:
    """Whether the ranks' tensors represent a value in a placement."""
    if isinstance(placement, Partial):
        if any(each.shape != value.shape for each in local):
            return False
        with np.errstate(all="ignore"):
            return difference([_COMBINE[placement.op](local, axis=0).astype(value.dtype)], [value]) is None
    expected = shards(value, placement, ranks) if isinstance(placement, Sharded) else [value] * ranks.size
    return all(difference([got], [want]) is None for got, want in zip(local, expected))


# ---- the cut's own choice


def _moved(traced: Traced, states: States, rng: np.random.Generator) -> tuple[int, ...]:
    """Returns the operands that the cut gathers or combines."""
    report = Moved()
    with tf.Graph().as_default():
        Trial(traced, states, rng).of_rank(0, NoRanks(), report=report)
    return tuple(at for at, each in enumerate(traced.graph.inputs) if any(each is one.tensor for one in report.values))


def missing(cases: Iterable[Case], static: bool = True) -> Iterator[tuple[Missing, Case]]:
    """Yields the missing placements, with their case. `static`: tracing sees the number of rows."""
    for case in cases:
        rng = np.random.default_rng(0)
        traced = Traced(case, Ranks(2, SETTINGS[0].rows, static), rng)
        choices = [traced.placements(index) for index in range(len(traced.arrays))]
        moved, right = {}, _Right(case)
        for states in itertools.product(*choices):
            parts = sum(isinstance(each, Partial) for each in states)
            if any(each != REPLICATED for each in states) and parts <= _MOST_PARTS:
                moved[states] = _moved(traced, states, rng)
        for states, operands in moved.items():
            if not operands:
                continue
            sliced = [
                [each, *(c for c in among if isinstance(c, Sharded) and each == REPLICATED)]
                for each, among in zip(states, choices)
            ]
            found = []
            for each in itertools.product(*sliced):
                results = right.results(each) if each == states or not moved[each] else None
                if results is not None:
                    found.append(Missing(case.type, states, operands, each, results, right.are_finite(each)))
            if found:
                yield min(found, key=lambda each: each.finite), case  # min prefers unsliced operands


# ---- types of operations without a spec, for which test_specs.py has no cases


def _without_row() -> list[Case]:
    found = [Case("CheckNumerics", ["n2 f"], {"message": ""}), Case("MatrixSetDiagV3", ["n33 f", "n3 f", np.int32(0)])]
    found += [Case("TensorScatterAdd", ["nn f", "n1 x", "nn f"])]
    found += [Case("FakeQuantWithMinMaxArgs", ["n2 h"], {"min": -2.0, "max": 2.0})]
    found += [Case(f"UnsortedSegment{op}", ["n2 f", "n x", np.int32(9)]) for op in ("Sum", "Max", "Min", "Prod")]
    found += [Case("ScatterNd", ["n1 x", "n3 f", lambda n: np.int32([n, 3])])]
    return found


# ---- costs


class _Costs(Report):
    """Counts the bytes that each type of operation gathers and combines."""

    def __init__(self) -> None:
        super().__init__()
        self.combined: Counter[str] = Counter()

    def bucketed(
        self, kind: str, values: Sequence[Value], readers: Sequence[Node | None], compressed: bool = False
    ) -> None:
        super().bucketed(kind, values, readers, compressed)
        for value, reader in zip(values, readers):
            if reader is not None:
                self.combined[reader.type] += (value.shape.num_elements() or 0) * value.dtype.size

    def by_type(self) -> Counter[str]:
        """Returns the gathered bytes by type of operation."""
        found: Counter[str] = Counter()
        for each in self.entries:
            if each.kind == "gather" and each.reason.endswith(" needs all rows"):
                found[each.reason.split()[0]] += each.few_rows_bytes if each.bytes is None else each.bytes
            elif each.kind == "gather" and each.is_intentional and each.reason != "is a result":
                found[f"on purpose: {each.reason}"] += each.few_rows_bytes if each.bytes is None else each.bytes
        return found


def costs(names: Sequence[str], static: bool = True) -> tuple[Counter[str], Counter[str]]:
    """Returns the bytes that each type of operation gathers, and combines, in a step of each network (none: all)."""
    from cut import zoo

    gathered, combined = Counter(), Counter()
    for name, make in {**zoo.QUICK, **zoo.LONG}.items():
        if names and name not in names:
            continue
        model, batch = make()
        model._symbolic_build(data_batch=batch if isinstance(batch, tuple) else (batch,))
        report = _Costs()
        report_of(model.train_step, batch, static=static, report=report)
        gathered += report.by_type()
        combined += report.combined
    return gathered, combined


def table(found: Iterable[tuple[Missing, Case]], gathered: Mapping[str, int], combined: Mapping[str, int]) -> list[str]:
    """Returns the lines of a Markdown table: types with equal lines together, the most expensive first."""
    lines: dict[tuple[str, ...], dict[str, list[Case]]] = {}
    for each, case in found:
        lines.setdefault(each.cells(), {}).setdefault(each.type, []).append(case)

    def cost(types: Iterable[str]) -> tuple[int, int]:
        return sum(gathered.get(each, 0) for each in types), sum(combined.get(each, 0) for each in types)

    order = sorted(
        lines,
        key=lambda cells: (cells[2] == "finite", *(-each for each in cost(lines[cells])), "S" not in cells[0], cells),
    )
    rows = [
        "| types (cases) | operands | could be | holds for | moved | gathered, combined (bytes) | for example |",
        "|" + "---|" * 7,
    ]
    for cells in order:
        types = lines[cells]
        example = next(iter(types.values()))[0]
        shapes = ", ".join(each if isinstance(each, str) else "constant" for each in example.operands)
        attrs = ", ".join(f"{name}={each}" for name, each in example.attrs.items())
        bytes_ = ", ".join(f"{each:,}" for each in cost(types))
        rows.append(
            "| "
            + " | ".join(
                [
                    " ".join(f"{each} ({len(types[each])})" for each in sorted(types)),
                    *cells,
                    bytes_,
                    f"{shapes} {attrs}".strip(),
                ]
            )
            + " |"
        )
    types = {each for line in lines.values() for each in line}
    others = sorted(((count, each) for each, count in gathered.items() if each not in types), reverse=True)
    return rows + [
        f"\nGathered, and no placement without it is known: {each}, {count:,} bytes" for count, each in others
    ]


def main() -> None:
    from cut.test_specs import TOPICS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", metavar="TYPE", help="only this type of operation; may be repeated")
    parser.add_argument("--open", action="store_true", help="as if tracing did not know the number of rows")
    parser.add_argument("--zoo", nargs="*", metavar="NETWORK", help="also count the networks of zoo.py (default: all)")
    options = parser.parse_args()
    cases = [each for topic in (*TOPICS.values(), _without_row()) for each in topic]
    cases = [each for each in cases if not options.only or each.type in options.only]
    static = not options.open
    gathered, combined = costs(options.zoo, static) if options.zoo is not None else (Counter(), Counter())
    print("\n".join(table(missing(cases, static), gathered, combined)))


if __name__ == "__main__":
    main()
