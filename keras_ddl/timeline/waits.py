"""Exposed communication: the time in which a rank waits for collectives, and computes nothing.

What a timeline knows is when a rank had a collective's input ready (*submitted*) and when its result was there
(*finished*). Collectives of one round do not wait for one another (cut/collectives.py): while some are under way, the
rank computes the inputs of the next. Once it has submitted the last of a round, nothing is left to compute until their
results come. So a round is exposed from its last submission to its last end. That is an upper bound: what does not
depend on the results, such as the update of a weight whose sum has come, may be computed meanwhile.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from keras_ddl.timeline.files import Collective

Interval = tuple[float, float]  # begin, end

# What ranks tell each other at the start of a step (data/order.py). Of batches whose rows are known before, no rank
# waits for it, except in the few steps whose batch is compared.
_ROWS = re.compile(r"(needed_)?rows(?:_\d+)?")
_ROUND = re.compile(r"(?:.*/)?after_\d+/")
_WHOLE_ARGUMENT = re.compile(r".*/batch_\d+")


def tells_rows(name: str) -> bool:
    """Whether it is the exchange with which a step begins when its batch has come."""
    return _ROWS.fullmatch(name) is not None


def round_of(name: str) -> str:
    """Returns what collectives that are under way while one another's inputs are computed have in common."""
    body, _, iteration = name.partition("#")
    match = _ROUND.match(body) or _WHOLE_ARGUMENT.fullmatch(body) or _ROWS.fullmatch(body)
    return (match[0] if match else "") + iteration


def rounds(collectives: Iterable[Collective]) -> dict[str, list[Collective]]:
    """Returns round -> its collectives, in the order of submission, of the collectives of one step of one rank."""
    by_round: dict[str, list[Collective]] = {}
    for one in sorted(collectives, key=lambda one: one.submitted):
        rows = _ROWS.fullmatch(one.name)
        if rows is None or rows[1]:
            by_round.setdefault(round_of(one.name), []).append(one)
    return by_round


def exposed(collectives: Iterable[Collective]) -> list[Interval]:
    """Returns when a rank waited in one step, by its collectives there: intervals that do not overlap, in order."""
    waits = [(group[-1].submitted, max(one.finished for one in group)) for group in rounds(collectives).values()]
    return union(waits)


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Returns the same moments in intervals that do not overlap, in order; empty ones are left out."""
    merged: list[Interval] = []
    for begin, end in sorted(each for each in intervals if each[1] > each[0]):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def clipped(intervals: Iterable[Interval], begin: float, end: float) -> list[Interval]:
    """Returns the parts of intervals that lie between two moments."""
    parts = [(max(begin, one), min(end, other)) for one, other in intervals]
    return [each for each in parts if each[1] > each[0]]


def seconds(intervals: Iterable[Interval]) -> float:
    """Returns how long intervals are together."""
    return sum(end - begin for begin, end in intervals)
