"""Measures from a timeline how much of a step's communication is exposed, and how much overlaps the backward pass.

A rank's backward pass ends when the rank has submitted its last bucket. Earlier communication is hidden behind
computation; later communication is exposed, because the optimizer waits for it. Sums in the forward pass
(BatchNormalization's statistics) are a few bytes; the forward pass's wait for them is not counted.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import keras_ddl
from keras_ddl import parts
from keras_ddl.communicator import recording
from keras_ddl.communicator.step_names import COMMIT

if TYPE_CHECKING:
    from keras_ddl import timeline


class Traffic(NamedTuple):
    """Communication of a step's gradients: medians over steps, mean over ranks. Seconds, bytes of one rank, shares."""

    communication: float  # time in which at least one sum of gradients ran
    exposed: float  # the part of `communication` after the backward pass
    waiting: float  # time after the backward pass without a running sum: other ranks had not submitted theirs
    lead: float  # mean time from a byte's submission to the end of the backward pass, which can hide its exchange
    nbytes: float
    wire: float  # share of the bytes that was reduced before the backward pass ended
    ready: float  # share that was submitted before that, an upper bound of `wire`


def watched(train: Callable[[], object]) -> Traffic | None:
    """Calls `train` under a timeline and returns its traffic. COLLECTIVE.

    None: KERAS_DDL_TIMELINE is being written, or the timeline part is not installed.

    A bucket in progress when the backward pass ends counts in proportion to its time before that.
    """
    if recording.is_on() or parts.is_missing("timeline"):
        train()
        return None
    with tempfile.TemporaryDirectory() as folder:
        path = recording.start(Path(folder, "step.json"), keras_ddl.rank())
        try:
            train()
        finally:
            recording.stop()
        mine = traffic(path)
    everyone = keras_ddl.all_gather_object(mine)
    return Traffic(*(statistics.mean(column) for column in zip(*everyone)))


def traffic(path: Path) -> Traffic:
    """Returns the traffic in one rank's timeline file; zeros if it has no step with gradients."""
    from keras_ddl import timeline

    gradients = [one for one in timeline.collectives(path) if one.role.trains and one.role.kind != COMMIT]
    traffic_by_step = []
    for event in timeline.read(path):
        if event.get("cat") != "step":
            continue
        begin, end = event["ts"] * 1e-6, (event["ts"] + event["dur"]) * 1e-6
        step = [one for one in gradients if begin <= one.submitted <= end]
        if step:
            traffic_by_step.append(_traffic_of_step(step))
    if not traffic_by_step:
        return Traffic(*(0.0 for _ in Traffic._fields))
    return Traffic(*(statistics.median(column) for column in zip(*traffic_by_step)))


def _traffic_of_step(step: list[timeline.Collective]) -> Traffic:
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
    """Returns the length of the union of (begin, end) intervals; an interval that ends before it begins is empty."""
    covered, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        covered += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return covered


def _part_before(moment: float, begin: float, end: float) -> float:
    return min(1.0, max(0.0, (moment - begin) / max(end - begin, 1e-9)))
