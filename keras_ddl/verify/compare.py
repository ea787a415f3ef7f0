"""Compares recordings: how far ranks are from one process, and how far one process is from itself.

The distance of two arrays is their largest difference, relative to the largest entry of the array, or to a hundredth
of the largest entry of all arrays of its kind (weights, each slot of an optimizer, logs), whichever is more: what is
zero but for rounding has no scale of its own. Integers must be equal.

What rounding allows is measured: one process runs again, its weights changed by one unit in the last place. Ranks round
sums in another order, which is a change of that size. They may be FACTOR times as far away, or FACTOR units in the last
place where that is more. Nothing here needs more than NumPy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from keras_ddl.verify.recording import Event

FACTOR = 100.0
SHARE_OF_KIND = 1e-2
# Where one process is this far from itself, rounding hides what ranks do.
USELESS = 0.1


class Recorded(Protocol):
    """A recording (recording.py)."""

    events: list[Event]

    def arrays(self, event: Event) -> dict[str, np.ndarray]: ...


@dataclass
class Distance:
    """How far two recordings are apart in one event.

    Attributes: by_name: of each array. apart: what makes them incomparable from here on; "": nothing does.
    """

    event: Event
    by_name: dict[str, float] = field(default_factory=dict)
    apart: str = ""

    @property
    def largest(self) -> float:
        return max(self.by_name.values(), default=0.0)

    @property
    def farthest(self) -> str:
        """The name of the array that is farthest away; "" if there is none."""
        return max(self.by_name, key=lambda name: self.by_name[name], default="")


def distances(one: Recorded, other: Recorded) -> Iterator[Distance]:
    """Yields the distances of all events that both have, until they are different events."""
    for ours, theirs in zip(one.events, other.events):
        if ours.label != theirs.label:
            yield Distance(ours, apart=f"{theirs.label} in place of {ours.label}")
            return
        yield _of_event(ours, theirs, one.arrays(ours), other.arrays(theirs))


def _of_event(ours: Event, theirs: Event, one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> Distance:
    of_kind: dict[str, float] = {}
    scales = {name: max(ours.scales.get(name, 0.0), theirs.scales.get(name, 0.0)) for name in {**one, **other}}
    for name, scale in scales.items():
        kind = ours.kinds.get(name, "")
        of_kind[kind] = max(of_kind.get(kind, 0.0), scale)
    result = Distance(ours)
    for name, scale in scales.items():
        if name not in one or name not in other:
            result.by_name[name] = math.inf
            continue
        scale = max(scale, SHARE_OF_KIND * of_kind[ours.kinds.get(name, "")])
        result.by_name[name] = distance(one[name], other[name], scale) / math.sqrt(ours.rows.get(name, 1))
    return result


def distance(one: np.ndarray, other: np.ndarray, scale: float) -> float:
    """Returns the largest difference of two arrays in units of `scale`; inf where they cannot be compared."""
    if one.shape != other.shape:
        return math.inf
    if one.dtype.kind != "f" or other.dtype.kind != "f":
        return 0.0 if np.array_equal(one, other) else math.inf
    ours, theirs = one.astype(np.float64), other.astype(np.float64)
    differ = ~((ours == theirs) | (np.isnan(ours) & np.isnan(theirs)))
    if not differ.any():
        return 0.0
    ours, theirs = ours[differ], theirs[differ]
    if not (np.isfinite(ours).all() and np.isfinite(theirs).all()):
        return math.inf
    return math.inf if scale == 0.0 else float(np.max(np.abs(ours - theirs))) / scale


@dataclass
class Row:
    """One event, judged.

    Attributes: ranks: distance of the ranks from one process. drift: of one process from itself, its last bits changed.
        allowed: what `ranks` may be.
    """

    event: Event
    ranks: Distance
    drift: float
    allowed: float

    @property
    def is_beyond(self) -> bool:
        return bool(self.ranks.apart) or not self.ranks.largest <= self.allowed

    @property
    def beyond(self) -> list[tuple[str, float]]:
        """The arrays that are too far away, the farthest first, with their distances."""
        some = [(name, far) for name, far in self.ranks.by_name.items() if not far <= self.allowed]
        return sorted(some, key=lambda each: -each[1])


@dataclass
class Judgement:
    """What the ranks of one pair of runs are.

    Attributes:
        rows: what was compared, in order, up to the first that is beyond what rounding allows.
        useless_from: the first event of which rounding hides everything; None: there is none.
    """

    rows: list[Row]
    useless_from: Event | None = None

    @property
    def steps(self) -> int:
        """Training steps that were compared."""
        return sum(each.event.kind == "step" for each in self.rows)

    @property
    def first_beyond(self) -> Row | None:
        return next((row for row in self.rows if row.is_beyond), None)

    @property
    def largest(self) -> Row | None:
        """The row in which the ranks are farthest from one process."""
        return max(self.rows, key=lambda row: row.ranks.largest, default=None)

    @property
    def drift(self) -> float:
        return max((row.drift for row in self.rows), default=0.0)

    @property
    def allowed(self) -> float:
        return max((row.allowed for row in self.rows), default=0.0)

    @property
    def verdict(self) -> str:
        """ "equal", "different", or "unknown": no step could be compared."""
        if self.first_beyond is not None:
            return "different"
        return "equal" if self.steps else "unknown"


def judge(one: Recorded, ranks: Recorded, last_bit: Recorded | None, epsilon: float) -> Judgement:
    """Compares ranks with one process.

    Args:
        one, ranks, last_bit: recordings of one process, of the ranks, and of one process with its last bits changed;
            None: there is none, and FACTOR units in the last place are allowed.
        epsilon: a unit in the last place of the weights.
    """
    drifts = _running(() if last_bit is None else distances(one, last_bit))
    rows: list[Row] = []
    for number, far in enumerate(distances(one, ranks)):
        # The change may not have shown before the second step: it is made where weights are first known.
        drift = drifts[min(max(number, _second_step(one)), len(drifts) - 1)] if drifts else 0.0
        allowed = FACTOR * max(epsilon, drift)
        if drift > USELESS:
            return Judgement(rows, far.event)
        rows.append(Row(far.event, far, drift, allowed))
        if rows[-1].is_beyond:
            break
    return Judgement(rows)


def _running(some: Iterator[Distance] | tuple[()]) -> list[float]:
    """Returns the largest distance so far, for each event."""
    result: list[float] = []
    for each in some:
        result.append(max([*result[-1:], math.inf if each.apart else each.largest]))
    return result


def _second_step(one: Recorded) -> int:
    steps = [number for number, event in enumerate(one.events) if event.kind == "step"]
    return steps[1] if len(steps) > 1 else steps[0] if steps else 0


def first_difference(one: Recorded, again: Recorded, epsilon: float) -> Distance | None:
    """Returns where two runs of the same program in one process differ by more than rounding; None: nowhere."""
    return next((each for each in distances(one, again) if each.apart or each.largest > FACTOR * epsilon), None)
