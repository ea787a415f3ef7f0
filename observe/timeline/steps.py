"""Reads the steps of all ranks from their timelines, with all times on rank 0's clock."""

from __future__ import annotations

import os
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from keras_ddl.errors import ConfigError
from keras_ddl.timeline import files as timeline_files
from keras_ddl.timeline import waits
from keras_ddl.timeline.files import Collective
from keras_ddl.timeline.waits import Interval

_STEP = re.compile(r"step (\d+)")
_LABEL = re.compile(r"rank \d+ \((.*)\)")
_RANK_FILE = re.compile(r"(.*)\.rank\d+(\.\w+)?")
# Smaller differences between hosts' clocks are not corrected, because collectives cannot measure them.
_CLOCK_SECONDS = 1e-3


@dataclass(frozen=True)
class Step:
    """One step of fit on one rank. Times are seconds since 1970, by the clock of rank 0's host.

    Attributes:
        number: number in its epoch; for several steps in one execution, the last step's number.
        arrived: when its batch was ready; None if unknown (one rank, or a loop without the Strategy).
        next: when the next step of the epoch began, after Keras and the callbacks; `end` in the last step of an epoch.
        exposed: the intervals in which the rank only waited for collectives.
    """

    number: int
    begin: float
    arrived: float | None
    end: float
    next: float
    exposed: list[Interval]
    collectives: list[Collective]

    @property
    def total(self) -> float:
        """Seconds from its beginning to the beginning of the next step."""
        return self.next - self.begin

    @property
    def input(self) -> float:
        """Seconds until its batch was ready."""
        return 0.0 if self.arrived is None else self.arrived - self.begin

    @property
    def waiting(self) -> float:
        """Seconds of exposed communication."""
        return waits.seconds(self.exposed)

    @property
    def between(self) -> float:
        """Seconds after the step in which Keras and callbacks ran."""
        return self.next - self.end - waits.seconds(waits.clipped(self.exposed, self.end, self.next))

    @property
    def compute(self) -> float:
        """The remaining seconds."""
        return max(0.0, self.total - self.input - self.waiting - self.between)


@dataclass(frozen=True)
class RankSteps:
    """The steps of one rank."""

    rank: int
    host: str
    steps: list[Step]


def read(path: str | os.PathLike[str]) -> list[RankSteps]:
    """Returns the steps of all ranks, in the order of ranks, with the same number of steps for each.

    Args:
        path: a file of `timeline.merge`, the value of KERAS_DDL_TIMELINE, a rank's file, or a folder of one job's
            files.
    Raises:
        ConfigError: there is no timeline, a file is not a timeline, or a rank has no steps.
    """
    events: dict[int, list[dict[str, Any]]] = {}
    for file in files(Path(path)):
        for event in _events(file):
            events.setdefault(event["pid"], []).append(event)
    ranks = [_rank_steps(rank, events[rank]) for rank in sorted(events)]
    count = min((len(each.steps) for each in ranks), default=0)
    if count == 0:
        without = [each.rank for each in ranks if not each.steps]
        raise ConfigError(
            f"trace: the timeline of every rank must contain training steps. Received: {path}, without steps on "
            f"rank(s) {without}. fit marks its steps; in a loop of your own, mark them with `with timeline.span(f'step "
            "{i}'):`."
        )
    ranks = [replace(each, steps=each.steps[:count]) for each in ranks]
    return [ranks[0], *(_on_clock_of(ranks[0], each) for each in ranks[1:])]


def files(path: Path) -> list[Path]:
    """Returns the timeline files of a job. Raises: ConfigError: there are none, or files of several jobs."""
    if path.is_dir():
        parts = sorted(each for each in path.iterdir() if _RANK_FILE.fullmatch(each.name) and each.suffix != ".html")
        jobs = sorted({_RANK_FILE.sub(r"\1\2", each.name) for each in parts})
        if len(jobs) > 1:
            raise ConfigError(
                f"trace: a folder must hold the timelines of one job. Received: {path}, with {', '.join(jobs)}. Name "
                f"one of them, as in {path / jobs[0]}."
            )
    elif path.exists():
        return [path]
    else:
        parts = timeline_files.paths_of_ranks(path)
    if not parts:
        raise ConfigError(
            f"trace: there must be timelines of ranks. Received: {path}, without any. Train with "
            "KERAS_DDL_TIMELINE=/tmp/step.json, and pass /tmp/step.json."
        )
    return parts


def _events(file: Path) -> list[dict[str, Any]]:
    try:
        events, problem = timeline_files.read(file), "it has no events"
        if events and all("pid" in event and "ph" in event for event in events):
            return events
    except (ValueError, TypeError) as error:
        problem = str(error)
    raise ConfigError(
        "trace: the file must be a timeline, as KERAS_DDL_TIMELINE and timeline.start write it. Received: "
        f"{file}: {problem}."
    )


def _rank_steps(rank: int, events: Sequence[dict[str, Any]]) -> RankSteps:
    label = next((each["args"]["name"] for each in events if each["name"] == "process_name"), "")
    host = _LABEL.fullmatch(label)
    spans = sorted(
        (event["ts"] * 1e-6, (event["ts"] + event["dur"]) * 1e-6, int(match[1]))
        for event in events
        if event.get("cat") == "step" and event["ph"] == "X" and (match := _STEP.fullmatch(event["name"]))
    )
    return RankSteps(rank, host[1] if host else "", steps_of_spans(spans, timeline_files.collectives_of(events)))


def steps_of_spans(spans: Sequence[tuple[float, float, int]], collectives: Iterable[Collective]) -> list[Step]:
    """Returns the steps of one rank.

    Args:
        spans: (begin, end, number) of each step, in order.
        collectives: collectives of the same rank and clock.
    """
    collectives = sorted(collectives, key=lambda one: one.submitted)
    steps, place = [], 0
    for index, (begin, end, number) in enumerate(spans):
        follows = index + 1 < len(spans) and spans[index + 1][2] > number
        after = max(end, spans[index + 1][0]) if follows else end
        while place < len(collectives) and collectives[place].submitted < begin:
            place += 1
        first = place
        while place < len(collectives) and collectives[place].submitted < after:
            place += 1
        steps.append(_step(number, begin, end, after, collectives[first:place]))
    return steps


def _step(number: int, begin: float, end: float, after: float, collectives: list[Collective]) -> Step:
    arrived = next((one.submitted for one in collectives if one.role.begins_step), None)
    inside = [one for one in collectives if one.submitted <= end]
    # Between steps Python waits for every collective, from its submission to its end.
    between = [(one.submitted, one.finished) for one in collectives if one.submitted > end]
    exposed = waits.clipped(waits.union([*waits.exposed(inside), *between]), begin, after)
    return Step(number, begin, arrived, end, after, exposed, collectives)


def _on_clock_of(first: RankSteps, other: RankSteps) -> RankSteps:
    """Returns `other` on the clock of `first`, if the two are on different hosts.

    The offset is the median difference between the ends of common collectives, which all ranks reach at almost the same
    time.
    """
    if first.host == other.host:
        return other
    ends = _ends(first)
    differences = [end - ends[key] for key, end in _ends(other).items() if key in ends]
    ahead = statistics.median(differences) if differences else 0.0
    if abs(ahead) < _CLOCK_SECONDS:
        return other
    return replace(other, steps=[_shifted(each, -ahead) for each in other.steps])


def _ends(rank: RankSteps) -> dict[tuple[int, str, int], float]:
    ends = {}
    for index, step in enumerate(rank.steps):
        seen: Counter[str] = Counter()
        for one in step.collectives:
            ends[index, one.name, seen[one.name]] = one.finished
            seen[one.name] += 1
    return ends


def _shifted(step: Step, by: float) -> Step:
    times = ("submitted", "agreed", "started", "finished")
    return replace(
        step,
        begin=step.begin + by,
        arrived=None if step.arrived is None else step.arrived + by,
        end=step.end + by,
        next=step.next + by,
        exposed=[(begin + by, end + by) for begin, end in step.exposed],
        collectives=[replace(one, **{each: getattr(one, each) + by for each in times}) for one in step.collectives],
    )
