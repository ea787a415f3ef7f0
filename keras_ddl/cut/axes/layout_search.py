"""Chooses which variables of a step are cut along the model axis, and along which of their axes.

Every layout gives the results of one process, so the choice affects only memory and speed. The search is greedy, and
gives the same result wherever the same program was traced. Starting with the largest variable, each of its axes is
tried (trial.py), together with the variables that go with it, such as the kernel that contracts over the first one's
result, the biases between them, and keys and values with queries. The axis that moves the fewest bytes for each byte
saved is taken, unless it moves too many. Blocks whose paths differ only by a number are cut in the same way.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from keras_ddl.cut.analysis.placements import Placement
from keras_ddl.cut.analysis.program import Node, Program, Value
from keras_ddl.cut.axes.trial import Trials, TriedLayout
from keras_ddl.errors import ConfigError

# Bytes that a step may move for each byte of memory that is saved on a rank. For a transformer block, 20,000 tokens of
# width 1,024 in float32 under Adam, the sums take 10.
MOST_MOVED = 64
MOST_BUILT = 30_000  # operations in trials, half a minute or less; variables not tried by then stay uncut
_SMALLEST = 1000  # variables with a smaller fraction of all bytes, and vectors, are not tried on their own
_MOST_ROUNDS = 8
# An axis is dropped if it moves this many times the bytes of another axis, alone and with the variables that join it.
_MOST_ALONE, _MOST_TOGETHER = 4, 2
_MOST_REJECTED = 3  # variables of one kind


@dataclass(frozen=True, eq=False)
class Unit:
    """A variable and its optimizer slots, which are cut in the same way.

    Attributes:
        handles: handles of all of them, as values of the program.
        bytes: their total size.
    """

    path: str
    shape: tuple[int, ...]
    bytes: int
    handles: tuple[Value, ...]

    @property
    def kind(self) -> tuple[str, tuple[int, ...]]:
        """A key that is equal for variables in equal places of equal blocks."""
        return re.sub(r"\d+", "#", self.path), self.shape

    @property
    def numbers(self) -> tuple[str, ...]:
        return tuple(re.findall(r"\d+", self.path))


@dataclass
class _Group:
    """Variables that are cut together. `moved`: bytes moved in a step. `sharded`: operations that use their shards."""

    axes: dict[Unit, int]
    moved: int = 0
    saved: int = 0
    sharded: set[Node] = field(default_factory=set)


def choose(program: Program, units: Sequence[Unit], size: int, placements: Sequence[Placement] = ()) -> dict[Unit, int]:
    """Returns the variables to cut over `size` model ranks, with the axis along which to cut them.

    program: a step, traced on the global batch.
    units: the variables that may be cut, in an order that is the same on all ranks.
    placements: the placements of the arguments, as for `cut_along_model`.
    """
    search = _Search(Trials(program, size, placements), units, size)
    search.run()
    return {unit: search.axes[unit] for unit in units if unit in search.axes}


class _Search:
    """Searches for groups of variables to cut, the largest variables first.

    axes: the axes chosen so far.
    """

    def __init__(self, trials: Trials, units: Sequence[Unit], size: int) -> None:
        self._trials, self._units, self._size = trials, units, size
        self._unit_of = {handle: unit for unit in units for handle in unit.handles}
        self._by_place = {(unit.kind, unit.numbers): unit for unit in units}
        self._groups: list[_Group] = []
        self._built = 0  # operations, in trials
        self.axes: dict[Unit, int] = {}

    def run(self) -> None:
        """Tries each large variable with the variables that must be cut with it, and keeps the groups that pay."""
        total = sum(each.bytes for each in self._units)
        rejected: dict[tuple[str, tuple[int, ...]], int] = {}
        for unit in sorted(self._units, key=lambda each: -each.bytes):
            if unit in self.axes or len(unit.shape) < 2 or unit.bytes * _SMALLEST < total:
                continue
            if rejected.get(unit.kind, 0) >= _MOST_REJECTED or self._built > MOST_BUILT:
                continue
            best = self._best(unit)
            if best is None:
                rejected[unit.kind] = rejected.get(unit.kind, 0) + 1
                continue
            for axes in [best.axes, *self._alike(best.axes)]:
                self.axes.update(axes)
            self._groups.append(best)

    def _best(self, unit: Unit) -> _Group | None:
        """Returns a variable's group that moves the fewest bytes per byte saved; None: every group moves too many."""
        first: dict[int, int] = {}  # bytes that the variable moves alone, by axis
        for axis in range(len(unit.shape)):
            least = min(first.values(), default=MOST_MOVED * unit.bytes)
            tried = self._run({unit: axis}, _MOST_ALONE * least) if self._is_divided(unit, axis) else None
            if tried is not None:
                first[axis] = tried.bytes - tried.bytes_of_joins
        best: _Group | None = None
        for axis in sorted(first, key=lambda each: first[each]):
            most = None if best is None else _MOST_TOGETHER * best.moved
            if most is not None and first[axis] > most:
                break
            group = self._grown({unit: axis}, [], most)
            if group is not None and (best is None or group.moved * best.saved < best.moved * group.saved):
                best = group
        if best is None:
            return None
        beside = [each for each in self._groups if each.sharded & best.sharded]
        if beside:
            others = {key: axis for each in beside for key, axis in each.axes.items()}
            before, best = self._run(others), self._grown(best.axes, beside)
            if before is None or best is None:
                return None
            best.moved = max(best.moved - before.bytes, 0)
        return best if best.moved <= MOST_MOVED * best.saved else None

    def _grown(
        self, axes: Mapping[Unit, int], beside: Sequence[_Group], most_bytes: float | None = None
    ) -> _Group | None:
        """Returns the group of these variables and others that join them, given other groups; None: moves too much."""
        group = _Group(dict(axes))
        others = {key: axis for each in beside for key, axis in each.axes.items()}
        for _ in range(_MOST_ROUNDS):
            tried = self._run({**others, **group.axes}, most_bytes)
            if tried is None:
                return None
            group.moved, group.sharded = tried.bytes, tried.sharded
            joins = [(self._unit_of.get(handle), axis) for handle, axis in tried.joins.items()]
            new = {
                unit: axis
                for unit, axis in joins
                if unit is not None and unit not in {**self.axes, **group.axes} and self._is_divided(unit, axis)
            }
            if not new:
                break
            group.axes.update(new)
        group.saved = sum(unit.bytes - unit.bytes // self._size for unit in group.axes)
        return group

    def _run(self, axes: Mapping[Unit, int], most_bytes: float | None = None) -> TriedLayout | None:
        """Returns the result of a trial; None: it cannot be built, or moves too much."""
        most_bytes = MOST_MOVED * sum(each.bytes for each in axes) if most_bytes is None else most_bytes
        layout = {handle: axis for unit, axis in axes.items() for handle in unit.handles}
        try:
            return self._trials.run(layout, most_bytes)
        except (ConfigError, ValueError):  # also TooManyBytes
            return None
        finally:
            self._built += self._trials.built

    def _is_divided(self, unit: Unit, axis: int) -> bool:
        return axis < len(unit.shape) and unit.shape[axis] > 0 and unit.shape[axis] % self._size == 0

    def _alike(self, axes: Mapping[Unit, int]) -> Iterator[dict[Unit, int]]:
        """Yields the corresponding groups of other blocks: variables whose paths have other numbers in the same places.

        Only complete groups: a block that lacks one of the variables, or in which one is already cut, is another kind
        of block.
        """
        first, *others = axes
        places = range(len(first.numbers))
        if any(len(each.numbers) != len(places) for each in others):
            return
        common = [place for place in places if all(each.numbers[place] == first.numbers[place] for each in others)]
        for unit in self._units:
            apart = [
                place for place in places if unit.kind == first.kind and unit.numbers[place] != first.numbers[place]
            ]
            if not apart or not set(apart) <= set(common):
                continue
            units = [
                self._by_place.get((each.kind, tuple(self._number(each, unit, place, common) for place in places)))
                for each in axes
            ]
            if all(each is not None and each not in self.axes for each in units):
                yield {each: axis for each, axis in zip(units, axes.values()) if each is not None}

    @staticmethod
    def _number(unit: Unit, block_unit: Unit, place: int, common: Sequence[int]) -> str:
        return block_unit.numbers[place] if place in common else unit.numbers[place]
