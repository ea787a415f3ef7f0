"""Computes exposed communication: the time in which a rank waits for collectives and computes nothing.

A timeline shows when a collective's input was ready on a rank (*submitted*) and when its result was ready (*finished*).
Collectives of one round do not wait for each other (cut/values/collectives.py): while some run, the rank computes the
inputs of the next. After the last submission of a round the rank has nothing to compute until the results arrive. So a
round is exposed from its last submission to its last end. This is an upper bound: work that does not depend on all
results, such as the update of a weight whose sum has arrived, may run in this time.
"""

from __future__ import annotations

from collections.abc import Iterable

from keras_ddl.communicator.step_names import ROWS
from keras_ddl.timeline.files import Collective

Interval = tuple[float, float]  # begin, end


def rounds(collectives: Iterable[Collective]) -> dict[str, list[Collective]]:
    """Groups the collectives of one step on one rank: round -> its collectives, in the order of submission."""
    by_round: dict[str, list[Collective]] = {}
    for one in sorted(collectives, key=lambda one: one.submitted):
        if one.role.kind != ROWS:
            by_round.setdefault(one.role.round, []).append(one)
    return by_round


def exposed(collectives: Iterable[Collective]) -> list[Interval]:
    """Returns when a rank waited in one step, given its collectives: disjoint intervals, in order."""
    waits = [(group[-1].submitted, max(one.finished for one in group)) for group in rounds(collectives).values()]
    return union(waits)


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Returns the union as disjoint intervals, in order, without empty ones."""
    merged: list[Interval] = []
    for begin, end in sorted(each for each in intervals if each[1] > each[0]):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def clipped(intervals: Iterable[Interval], begin: float, end: float) -> list[Interval]:
    parts = [(max(begin, one), min(end, other)) for one, other in intervals]
    return [each for each in parts if each[1] > each[0]]


def seconds(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)
