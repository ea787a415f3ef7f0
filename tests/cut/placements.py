"""Compares one operation under every combination of placements of its operands with one process.

All combinations for a type of operation are built on all ranks in one graph and run at once (see together.py). Entries
are multiples of 1/64, so sums of parts are exact. Parts are large and cancel out, so an operation that does not treat
them as parts of a sum gives another result.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from cut.comparing import difference
from cut.simulated import chunks
from cut.together import OPTIONS, Collectives, Turns, in_turns

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut import Batch, Program, Report, build_step
from keras_ddl.cut import Collectives as StepCollectives
from keras_ddl.cut.analysis.dims import Dim
from keras_ddl.cut.analysis.placements import REPLICATED, Partial, Placement, Replicated, Sharded


@dataclass
class Case:
    """One operation.

    Attributes:
        operands: for each operand its shape and the kind of its entries, as "n3 f", or a constant array.
            n: the number of rows of the batch; m: twice that.
            f: any; i: integers; p: at least 1.5; s: between 0 and 1; b: booleans; x: indices below the rows;
            t: strings; h: any, in float32; d: positive integers. A capital letter: no parts of it are tried.
        attrs: arguments of tf.raw_ops; "n" in a list stands for the number of rows.
    """

    type: str
    operands: Sequence[Any]
    attrs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Ranks:
    size: int
    rows: int
    static: bool = True  # whether tracing sees the number of rows


_TOGETHER = 100  # programs in one graph
Draw = Callable[[str, list[int], int, np.random.Generator], np.ndarray]  # a function like `entries`
SETTINGS = (Ranks(2, 3), Ranks(3, 2), Ranks(2, 1), Ranks(3, 4, static=False))


def differences(cases: Sequence[Case], ranks: Ranks, limit: int | None = None) -> tuple[list[str], int]:
    """Describes where ranks differ from one process, and returns the number of placements tried."""
    trials = [trial for case in cases for trial in _trials(case, ranks, limit)]
    wrong: list[str] = []
    for first in range(0, len(trials), _TOGETHER):
        wrong += _differences(trials[first : first + _TOGETHER], ranks)
    return wrong, len(trials)


def _differences(trials: Sequence[Trial], ranks: Ranks) -> list[str]:
    graph, outputs, expected = tf.Graph(), [[] for _ in range(ranks.size)], []
    with graph.as_default():
        expected = [trial.traced.one_process_results() for trial in trials]

    def make(rank: int, turns: Turns) -> None:
        for number, trial in enumerate(trials):
            outputs[rank].append(trial.rank_results(rank, Collectives(turns, rank), number))

    in_turns(graph, ranks.size, make)
    with tf.compat.v1.Session(graph=graph, config=OPTIONS) as session:
        wanted, found = session.run([expected, outputs])
    wrong = []
    for trial, want, *got in zip(trials, wanted, *found):
        for rank, each in enumerate(got):
            told = difference(each, want)
            if told is not None:
                wrong.append(f"{trial} rank {rank} of {ranks}: {told}")
    return wrong


def _trials(case: Case, ranks: Ranks, limit: int | None) -> Iterator[Trial]:
    rng = np.random.default_rng(zlib.crc32(repr(case).encode()))
    traced = Traced(case, ranks, rng)
    combinations = list(itertools.product(*map(traced.placements, range(len(traced.arrays)))))
    combinations = [each for each in combinations if any(placement != REPLICATED for placement in each)]
    if limit is not None and len(combinations) > limit:
        combinations = [combinations[at] for at in sorted(rng.choice(len(combinations), limit, replace=False))]
    for placements in combinations:
        yield Trial(traced, placements, rng)


class Traced:
    """A case traced for one process. `has_ranks`: whether tracing sees the ranks of the operands."""

    def __init__(
        self, case: Case, ranks: Ranks, rng: np.random.Generator, draw: Draw | None = None, has_ranks: bool = True
    ) -> None:
        self.case, self.ranks, self._draw, self._has_ranks = case, ranks, draw or entries, has_ranks
        self.arrays, self.kinds, self.letters = [], [], []
        self.graph = tf.__internal__.FuncGraph(case.type)
        with self.graph.as_default():
            operands = [self._operand(each, rng) for each in case.operands]
            self.graph.outputs = [tf.identity(each) for each in self.made(operands)]
        self.graph.inputs = [each for each in operands if each.op.type == "Placeholder"]

    def _operand(self, given: Any, rng: np.random.Generator) -> tf.Tensor:
        if not isinstance(given, str):
            rows = self.ranks.rows
            return tf.constant(given(rows) if callable(given) else given)
        letters, kind = given.split(" ") if not given.startswith(" ") else ("", given.strip())
        shape = [{"n": self.ranks.rows, "m": 2 * self.ranks.rows}.get(each) or int(each) for each in letters]
        array = self._draw(kind.lower(), shape, self.ranks.rows, rng)
        self.arrays.append(array)
        self.kinds.append(kind)
        self.letters.append(letters)
        known = [None if each in "nm" and not self.ranks.static else e for each, e in zip(letters, shape)]
        dtype = tf.as_dtype(array.dtype) if kind not in "tT" else tf.string
        return tf.compat.v1.placeholder(dtype, known if self._has_ranks else None)

    def made(self, operands: list[tf.Tensor]) -> list[tf.Tensor]:
        """Applies the operation and returns its results."""
        function = getattr(tf.raw_ops, self.case.type)
        names = list(function.__signature__.parameters)
        attrs = {
            name: [self.ranks.rows if e == "n" else e for e in each] if isinstance(each, list) else each
            for name, each in self.case.attrs.items()
        }
        if self.case.type == "ConcatV2":
            made = function(values=operands[:-1], axis=operands[-1])
        elif names[0] in ("inputs", "values") or self.case.type == "IdentityN":
            made = function(**{names[0]: operands}, **attrs)
        elif self.case.type == "Einsum":
            made = function(inputs=operands, **attrs)
        else:
            made = function(**dict(zip(names, operands)), **attrs)
        return tf.nest.flatten(made)

    def one_process_results(self) -> list[tf.Tensor]:
        """Returns the results of one process."""
        return self.made(self.in_place(self.arrays, self.ranks.rows))

    def in_place(self, arrays: Sequence[np.ndarray], rows: int) -> list[tf.Tensor]:
        """Returns `arrays` as operands, together with the constants for a batch of `rows` rows."""
        rest = iter(arrays)
        return [
            tf.constant(next(rest) if isinstance(each, str) else each(rows) if callable(each) else each)
            for each in self.case.operands
        ]

    def placements(self, index: int) -> list[Placement]:
        letters, kind = self.letters[index], self.kinds[index]
        found: list[Placement] = [REPLICATED]
        for axis, letter in enumerate(letters):
            if letter == "n":
                found.append(Sharded(axis))
            elif letter == "m":
                found += [Sharded(axis, Dim(2)), Sharded(axis, unit=Dim(2))]
            elif letter == "1" and self.ranks.rows == 1 and self.ranks.static:
                found.append(Sharded(axis))
        if kind in "fphis":
            found += [Partial("sum"), Partial("max")]
        return found


class Trial:
    """A traced case with one placement for each of its operands."""

    def __init__(self, traced: Traced, placements: Sequence[Placement], rng: np.random.Generator) -> None:
        self.traced, self.placements = traced, placements
        self.locals = [self._local(array, placement, rng) for array, placement in zip(traced.arrays, placements)]

    def __repr__(self) -> str:
        case = self.traced.case
        return f"{case.type} {case.operands} {case.attrs} {[*self.placements]}"

    def rank_results(
        self, rank: int, collectives: StepCollectives, number: int = 0, report: Report | None = None
    ) -> list[tf.Tensor]:
        ranks = self.traced.ranks
        first, mine = chunks(ranks.rows, ranks.size)[rank]
        batch = Batch(ranks.rows, mine, first)
        if not ranks.static:
            batch = Batch(*(tf.constant(each, tf.int64) for each in batch))
        local = []
        for arrays, letters in zip(self.locals, self.traced.letters):
            tensor = tf.constant(arrays[rank])
            if not ranks.static:  # a rank sees no more of the shape
                shape = [None if each in "nm" else e for each, e in zip(letters, tensor.shape)]
                tensor = tf.raw_ops.PlaceholderWithDefault(input=tensor, shape=shape)
            local.append(tensor)
        return build_step(
            Program(self.traced.graph, f"{number}/"), local, self.placements, batch, collectives, report=report
        )

    def _local(self, array: np.ndarray, placement: Placement, rng: np.random.Generator) -> list[np.ndarray]:
        ranks = self.traced.ranks
        if isinstance(placement, Replicated):
            return [array] * ranks.size
        if isinstance(placement, Partial):
            return _parts(array, placement.op, ranks.size, rng, 2**27 if self.traced.case.type == "Cast" else 2**10)
        return shards(array, placement, ranks)


def shards(array: np.ndarray, placement: Sharded, ranks: Ranks) -> list[np.ndarray]:
    """Returns each rank's shard of an array."""
    blocks, unit = placement.blocks.number, placement.unit.number
    front, back = array.shape[: placement.axis], array.shape[placement.axis + 1 :]
    seen = array.reshape(*front, blocks, ranks.rows, unit, *back)
    found = []
    for first, mine in chunks(ranks.rows, ranks.size):
        own = np.take(seen, range(first, first + mine), axis=placement.axis + 1)
        found.append(own.reshape(*front, blocks * mine * unit, *back))
    return found


def entries(kind: str, shape: list[int], rows: int, rng: np.random.Generator) -> np.ndarray:
    """Returns an operand's entries of one of the kinds in `Case`."""
    grid = rng.integers(-160, 161, shape)
    if kind == "b":
        return grid > 0
    if kind == "i":
        return (grid // 16 + 3).astype(np.int32)
    if kind == "d":  # divisors
        return (abs(grid) // 16 + 1).astype(np.int32)
    if kind == "x":
        return rng.integers(0, rows, shape).astype(np.int32)
    if kind == "t":
        return np.array([f"Text {each}" for each in grid.ravel()], dtype=object).reshape(shape)
    if kind == "p":
        return abs(grid) / 64 + 1.5
    if kind == "s":
        return (abs(grid) % 62 + 1) / 64
    return (grid / 64 + 0.125).astype(np.float32 if kind == "h" else np.float64)


def _parts(array: np.ndarray, op: str, size: int, rng: np.random.Generator, large: int) -> list[np.ndarray]:
    large = large if array.dtype == np.float64 else 2**5
    if op == "sum":
        others = [(rng.integers(-large, large, array.shape) | 1).astype(array.dtype) for _ in range(size - 1)]
        return [*others, (array - sum(others)).astype(array.dtype)]
    largest = rng.integers(0, size, array.shape)
    return [
        np.where(largest == rank, array, array - rng.integers(1, 40, array.shape)).astype(array.dtype)
        for rank in range(size)
    ]
