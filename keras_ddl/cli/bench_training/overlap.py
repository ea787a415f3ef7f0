"""What of a step's communication is exposed, and what travels while backward still runs, read from a timeline.

The backward pass of a rank ends when it has submitted its last bucket. What runs before is hidden behind computing; of
what runs later the optimizer waits for the last, so it is exposed. Sums in the forward pass, as of BatchNormalization's
statistics, are few bytes; that the forward pass waits for them is not seen here.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import keras_ddl
from keras_ddl import timeline


class Traffic(NamedTuple):
    """The gradients of a step, medians over steps and the mean over ranks; seconds, bytes of one rank, and shares."""

    communication: float  # in which at least one sum of gradients ran
    exposed: float  # of these, after backward had ended
    waiting: float  # after backward had ended, in which none ran: other ranks had not submitted theirs
    lead: float  # from a byte's submission to the end of backward, on average: what can hide its journey
    nbytes: float
    wire: float  # share of the bytes that was reduced before backward ended
    ready: float  # share that was submitted before: the most that `wire` can be


def watched(train: Callable[[], object]) -> Traffic | None:
    """Calls `train` under a timeline and returns its traffic; None if KERAS_DDL_TIMELINE is being written. COLLECTIVE.

    A bucket that is under way when backward ends counts by the time that it had.
    """
    if timeline.is_on():
        train()
        return None
    with tempfile.TemporaryDirectory() as folder:
        path = timeline.start(Path(folder, "step.json"))
        try:
            train()
        finally:
            timeline.stop()
        mine = traffic(path)
    everyone = keras_ddl.all_gather_object(mine)
    return Traffic(*(statistics.mean(column) for column in zip(*everyone)))


def traffic(path: Path) -> Traffic:
    """Returns that of one rank's timeline file: zeros if it has no step with gradients."""
    sums = [one for one in timeline.collectives(path) if "/train_step/" in one.name]
    gradients = [one for one in sums if not one.name.endswith("/commit")]  # which every step ends with, after the sums
    found = []
    for event in timeline.read(path):
        if event.get("cat") != "step":
            continue
        begin, end = event["ts"] * 1e-6, (event["ts"] + event["dur"]) * 1e-6
        step = [one for one in gradients if begin <= one.submitted <= end]
        if step:
            found.append(_of_step(step))
    if not found:
        return Traffic(*(0.0 for _ in Traffic._fields))
    return Traffic(*(statistics.median(column) for column in zip(*found)))


def _of_step(step: list[timeline.Collective]) -> Traffic:
    backward_ends = max(one.submitted for one in step)
    total = sum(one.bytes for one in step)
    runs = [(one.started, one.finished) for one in step]
    exposed = union((max(begin, backward_ends), end) for begin, end in runs)
    return Traffic(
        communication=union(runs),
        exposed=exposed,
        waiting=max(0.0, max(end for _, end in runs) - backward_ends - exposed),
        lead=sum(one.bytes * (backward_ends - one.submitted) for one in step) / max(1, total),
        nbytes=total,
        wire=sum(one.bytes * _part_before(backward_ends, one.started, one.finished) for one in step) / max(1, total),
        ready=sum(one.bytes for one in step if one.submitted < backward_ends) / max(1, total),
    )


def union(intervals: Iterable[tuple[float, float]]) -> float:
    """Returns the length of what (begin, end) intervals cover together; one that ends before it begins covers none."""
    covered, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        covered += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return covered


def _part_before(moment: float, begin: float, end: float) -> float:
    return min(1.0, max(0.0, (moment - begin) / max(end - begin, 1e-9)))
