"""Compares recordings: how far ranks are from one process, and how far one process is from itself.

The distance of two arrays is their largest difference, relative to the largest entry of the array, or to a hundredth
of the largest entry of all arrays of its kind (weights, each slot of an optimizer, logs) if that is more, because an
array that is zero except for rounding does not define a scale. Integers must be equal.

The effect of rounding is measured: one process runs again with its weights perturbed by one ulp. Ranks add in another
order, which is a change of that size. They may be FACTOR times as far away as this run, or FACTOR units in the last
place if that is more. Each kind of array and each log has its own allowance, so that a metric that jumps does not raise
the weights' allowance. If layers compute in fewer bits than weights have (mixed precision), every sum is rounded to
these bits, which one ulp of a weight does not show: COMPUTE_FACTOR units in their last place are allowed, a weak proof.
This module needs only NumPy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from keras_ddl.verify.recording import Event, Recording

FACTOR = 100.0
COMPUTE_FACTOR = 10.0
SHARE_OF_KIND = 1e-2
# A larger effect of rounding hides what the ranks do.
USELESS = 0.1
# The kind of metrics that count rows, which change by far more than rounding if one row changes its class. No row is
# expected within MARGIN of the edge of its class, so if less is allowed (float64), counts must be equal.
COUNTS = "counts"
MARGIN = 1e-9
_WEIGHTS, _APART = "weights", "apart "


@dataclass
class Distance:
    """The distance between two recordings in one event.

    Attributes:
        by_name: the distance of each array.
        apart: why the recordings cannot be compared from here on; "" if they can.
    """

    event: Event
    by_name: dict[str, float] = field(default_factory=dict)
    apart: str = ""

    @property
    def largest(self) -> float:
        return max(self.by_name.values(), default=0.0)

    @property
    def farthest(self) -> str:
        """The name of the array with the largest distance; "" without one."""
        return max(self.by_name, key=lambda name: self.by_name[name], default="")


def distances(one: Recording, other: Recording) -> Iterator[Distance]:
    """Yields the distances of all events that both recordings have, until the events themselves differ."""
    for ours, theirs in zip(one.events, other.events):
        if ours.label != theirs.label:
            yield Distance(ours, apart=f"{theirs.label} instead of {ours.label}")
            return
        yield _event_distance(ours, theirs, one.arrays(ours), other.arrays(theirs))


def _event_distance(
    ours: Event, theirs: Event, one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]
) -> Distance:
    scale_of_kind: dict[str, float] = {}
    scales = {name: max(ours.scales.get(name, 0.0), theirs.scales.get(name, 0.0)) for name in {**one, **other}}
    for name, scale in scales.items():
        kind = ours.kinds.get(name, "")
        scale_of_kind[kind] = max(scale_of_kind.get(kind, 0.0), scale)
    result = Distance(ours)
    for name, scale in scales.items():
        if name not in one or name not in other:
            result.by_name[name] = math.inf
            continue
        scale = max(scale, SHARE_OF_KIND * scale_of_kind[ours.kinds.get(name, "")])
        result.by_name[name] = distance(one[name], other[name], scale) / math.sqrt(ours.rows.get(name, 1))
    return result


def distance(one: np.ndarray, other: np.ndarray, scale: float) -> float:
    """Returns the largest difference of two arrays in units of `scale`; inf if they cannot be compared."""
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

    Attributes:
        ranks: distances of the ranks from one process.
        drifts: by name, distance of one process from itself with weights perturbed by one ulp.
        limits: by name, the largest distance allowed in `ranks`.
        hidden: arrays not judged, because rounding alone may change them by more than USELESS.
        flips: counts of rows (accuracy) that differ while nothing else does: rounding may change the class of a row.
    """

    event: Event
    ranks: Distance
    drifts: dict[str, float] = field(default_factory=dict)
    limits: dict[str, float] = field(default_factory=dict)
    hidden: list[str] = field(default_factory=list)
    flips: list[str] = field(default_factory=list)

    @property
    def is_beyond(self) -> bool:
        return bool(self.ranks.apart or self.beyond)

    @property
    def beyond(self) -> list[tuple[str, float]]:
        """The arrays beyond their limit with their distances, the farthest first."""
        some = [(name, far) for name, far in self._judged() if not far <= self.limits[name]]
        return sorted(some, key=lambda each: -each[1])

    @property
    def nearest(self) -> str:
        """The name of the array nearest to its limit, or farthest beyond it; "" without one."""
        return max(self._judged(), key=lambda each: each[1] / (self.limits[each[0]] or 1.0), default=("", 0.0))[0]

    @property
    def far(self) -> float:
        """The distance of `nearest`. `drift` and `allowed` belong to the same array."""
        return self.ranks.by_name.get(self.nearest, 0.0)

    @property
    def drift(self) -> float:
        return self.drifts.get(self.nearest, 0.0)

    @property
    def allowed(self) -> float:
        return self.limits.get(self.nearest, 0.0)

    def _judged(self) -> list[tuple[str, float]]:
        left_out = {*self.hidden, *self.flips}
        return [(name, far) for name, far in self.ranks.by_name.items() if name not in left_out]


@dataclass
class Judgement:
    """The judgement on a run of ranks, compared with a run of one process.

    Attributes:
        rows: the compared events in order, up to the first beyond its limit.
        useless_from: the first event in which rounding hides everything; None: there is none.
    """

    rows: list[Row]
    useless_from: Event | None = None

    @property
    def steps(self) -> int:
        return sum(each.event.kind == "step" for each in self.rows)

    @property
    def first_beyond(self) -> Row | None:
        return next((row for row in self.rows if row.is_beyond), None)

    @property
    def nearest(self) -> Row | None:
        """The row in which the ranks come closest to their limit, or are farthest beyond it."""
        return max(self.rows, key=lambda row: row.far / (row.allowed or 1.0), default=None)

    @property
    def hidden(self) -> list[str]:
        """The names not judged in some event, because rounding alone may change them by more than USELESS."""
        return sorted({name for row in self.rows for name in row.hidden})

    @property
    def flips(self) -> dict[str, float]:
        """Counts of rows that differ while nothing else does, with their largest distance."""
        some = [(row.ranks.by_name[name], name) for row in self.rows for name in row.flips]
        return {name: far for far, name in sorted(some)}

    @property
    def verdict(self) -> str:
        """ "equal", "different", or "unknown": no step could be compared."""
        if self.first_beyond is not None:
            return "different"
        return "equal" if self.steps else "unknown"


def judge(
    one: Recording, ranks: Recording, last_bit: Recording | None, epsilon: float, compute_epsilon: float = 0.0
) -> Judgement:
    """Compares ranks with one process.

    Args:
        one, ranks: recordings of one process and of the ranks.
        last_bit: recording of one process with weights perturbed by one ulp; None: there is none, and FACTOR units in
            the last place are allowed.
        epsilon: a unit in the last place of the weights.
        compute_epsilon: a unit in the last place of the dtype in which layers compute.
    """
    drifts = [] if last_bit is None else _running(distances(one, last_bit))
    rows: list[Row] = []
    for number, far in enumerate(distances(one, ranks)):
        # The perturbation may not show before the second step, because it is made when weights are first known.
        drift = drifts[min(max(number, _second_step(one)), len(drifts) - 1)] if drifts else {}
        # All computed values follow from the weights, so they may be as far away as the weights, but not vice versa.
        weight_drift = max(drift.get(_WEIGHTS, 0.0), drift.get(_APART, 0.0))

        def allowed(own: float) -> float:
            return max(FACTOR * max(epsilon, own), COMPUTE_FACTOR * compute_epsilon)

        if allowed(weight_drift) > USELESS:
            return Judgement(rows, far.event)
        row = Row(far.event, far)
        for name in far.by_name:
            row.drifts[name] = max(weight_drift, drift.get(_group(far.event, name), 0.0))
            row.limits[name] = allowed(row.drifts[name])
        row.hidden = [name for name, limit in row.limits.items() if limit > USELESS]
        beyond = {name for name, _ in row.beyond}
        if allowed(weight_drift) > MARGIN and all(far.event.kinds.get(name) == COUNTS for name in beyond):
            row.flips = sorted(name for name in beyond if math.isfinite(far.by_name[name]))
        rows.append(row)
        if row.is_beyond:
            break
    return Judgement(rows)


def _group(event: Event, name: str) -> str:
    """Returns the group of an array, whose drifts count together: its kind, or for a single number (a log) its name."""
    kind = event.kinds.get(name, "")
    return f"{kind} {name}" if kind in ("logs", "returned", COUNTS) else kind


def _running(some: Iterator[Distance]) -> list[dict[str, float]]:
    """Returns for each event the largest distances so far, by group."""
    result: list[dict[str, float]] = []
    for each in some:
        largest = dict(result[-1]) if result else {}
        if each.apart:
            largest[_APART] = math.inf
        for name, far in each.by_name.items():
            group = _group(each.event, name)
            largest[group] = max(largest.get(group, 0.0), far)
        result.append(largest)
    return result


def _second_step(one: Recording) -> int:
    steps = [number for number, event in enumerate(one.events) if event.kind == "step"]
    return steps[1] if len(steps) > 1 else steps[0] if steps else 0


def first_difference(one: Recording, again: Recording, epsilon: float) -> Distance | None:
    """Returns where two runs of a program in one process differ by more than rounding; None: nowhere."""
    first = next((each for each in distances(one, again) if each.apart or each.largest > FACTOR * epsilon), None)
    counts = len(one.events), len(again.events)
    if first is None and counts[0] != counts[1] and max(counts):
        longer = max(one, again, key=lambda each: len(each.events))
        return Distance(
            longer.events[max(min(counts) - 1, 0)], apart=f"how much is recorded: {counts[0]} and {counts[1]} events"
        )
    return first
