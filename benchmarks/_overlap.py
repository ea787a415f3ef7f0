"""How much of the gradients travels while backward still runs, read from a timeline."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import keras_ddl
from keras_ddl import timeline


class Overlap(NamedTuple):
    """Shares of the bytes of a step's gradients, medians over steps and the mean over ranks."""

    wire: float  # reduced before backward ended
    ready: float  # submitted before: the most that `wire` can be


def watched(train: Callable[[], None]) -> Overlap | None:
    """Calls `train` under a timeline and returns its overlap; None if KERAS_DDL_TIMELINE is being written. COLLECTIVE.

    Backward ends when its last bucket is submitted. A bucket that is under way then counts by the time that it had.
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
        shares = _steps(path)
    wire = statistics.median(wire for wire, _ in shares) if shares else 0.0
    ready = statistics.median(ready for _, ready in shares) if shares else 0.0
    everyone = keras_ddl.all_gather_object((wire, ready))
    return Overlap(*(statistics.mean(column) for column in zip(*everyone)))


def _steps(path: Path) -> list[tuple[float, float]]:
    gradients = [one for one in timeline.collectives(path) if "/train_step/" in one.name]
    found = []
    for event in timeline.read(path):
        if event.get("cat") != "step":
            continue
        begin, end = event["ts"] * 1e-6, (event["ts"] + event["dur"]) * 1e-6
        step = [one for one in gradients if begin <= one.submitted <= end]
        if not step:
            continue
        backward_ends = max(one.submitted for one in step)
        total = sum(one.bytes for one in step)
        wire = sum(one.bytes * _part_before(backward_ends, one.started, one.finished) for one in step)
        ready = sum(one.bytes for one in step if one.submitted < backward_ends)
        found.append((wire / total, ready / total))
    return found


def _part_before(moment: float, begin: float, end: float) -> float:
    return min(1.0, max(0.0, (moment - begin) / max(end - begin, 1e-9)))
