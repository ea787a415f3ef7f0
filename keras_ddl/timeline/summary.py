"""Where a step's time goes on each rank, which rank the others wait for, and which collectives are slow.

Parts of a step are means, so that they add up, over all steps but the longest, in which TensorFlow traces or somebody
waits for a disk. How late a rank is, and how long a collective takes, are medians. Seconds.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from keras_ddl.timeline import waits
from keras_ddl.timeline.steps import RankSteps, Step

# A step that takes so many times the median is not counted in means.
_UNUSUAL = 10
# A rank is called a straggler that is last in more than half of the steps (of few ranks, one often is by chance), by
# more than so many seconds, and more than this part of a step.
_OFTEN = 0.5
_LATE_SECONDS = 0.5e-3
_LATE_PART = 0.02
# A part of a step is named as the cause when it explains so much of the lateness.
_EXPLAINS = 0.3
PARTS = {"input": "input", "compute": "computing", "between": "time between steps"}


@dataclass(frozen=True)
class RankTimes:
    """A rank's steps.

    Attributes:
        step: from the begin of a step to that of the next.
        input: until the batch was there; None where nothing tells.
        compute: all that is not another part.
        exposed: communication that the rank waited for; `late_ranks` of it because other ranks came later.
        between: in Keras and callbacks between two steps.
        last: the part of the steps in which this rank came last, and `late` by how much then.
    """

    rank: int
    host: str
    step: float
    input: float | None
    compute: float
    exposed: float
    late_ranks: float
    between: float
    last: float
    late: float


@dataclass(frozen=True)
class Straggler:
    """A rank that the others wait for.

    Attributes: last: the part of the steps. late: behind the median of the others. causes: part of a step -> how much
        longer than the median of the others it takes there.
    """

    rank: int
    host: str
    last: float
    late: float
    causes: dict[str, float]


@dataclass(frozen=True)
class Bucket:
    """A collective of every step.

    Attributes: seconds: from when the last rank had it ready until the last had its result. ranks_apart: from when the
        first rank had it ready until the last had.
    """

    name: str
    kind: str
    bytes: int
    seconds: float
    ranks_apart: float
    steps: int


@dataclass(frozen=True)
class Summary:
    """What `keras-ddl trace summary` shows.

    Attributes: step, exposed, late_ranks: the mean over ranks of theirs. unusual: steps that are left out of means.
    """

    steps: int
    unusual: int
    step: float
    exposed: float
    late_ranks: float
    ranks: list[RankTimes]
    stragglers: list[Straggler]
    buckets: list[Bucket]

    def as_json(self) -> dict[str, Any]:
        """Returns the figures with names, for json.dumps."""
        return asdict(self)


def summarize(ranks: Sequence[RankSteps]) -> Summary:
    """Returns the figures of what `steps.read` has returned."""
    late = lateness(ranks)
    usual = _usual(ranks)
    times = [_times(number, ranks, late, usual) for number in range(len(ranks))]
    step = statistics.mean(each.step for each in times)
    return Summary(
        steps=len(late),
        unusual=len(late) - len(usual),
        step=step,
        exposed=statistics.mean(each.exposed for each in times),
        late_ranks=statistics.mean(each.late_ranks for each in times),
        ranks=times,
        stragglers=[_straggler(each, times) for each in times if _is_straggler(each, len(times), step)],
        buckets=_buckets(ranks),
    )


def lateness(ranks: Sequence[RankSteps]) -> list[list[float]]:
    """Returns for each step how much later each rank had its collectives ready than the median of the others, summed
    over the rounds in which it was the last; 0 in the others.
    """
    found = []
    for steps in zip(*(each.steps for each in ranks)):
        late = [0.0] * len(ranks)
        for arrivals in _arrivals(steps).values():
            last = max(range(len(ranks)), key=arrivals.__getitem__)
            others = [moment for number, moment in enumerate(arrivals) if number != last]
            if others:
                late[last] += arrivals[last] - statistics.median(others)
        found.append(late)
    return found


def _arrivals(steps: Sequence[Step]) -> dict[str, list[float]]:
    """Returns round -> when each rank had the last of it ready, of the rounds that all ranks have."""
    last = [{name: group[-1].submitted for name, group in waits.rounds(_inside(step)).items()} for step in steps]
    return {name: [each[name] for each in last] for name in last[0] if all(name in each for each in last)}


def _inside(step: Step) -> list[Any]:
    return [one for one in step.collectives if one.submitted <= step.end]


def _usual(ranks: Sequence[RankSteps]) -> list[int]:
    """Returns which steps are counted in means."""
    longest = [max(step.total for step in steps) for steps in _by_step(ranks)]
    limit = _UNUSUAL * statistics.median(longest)
    return [index for index, seconds in enumerate(longest) if seconds <= limit]


def _times(number: int, ranks: Sequence[RankSteps], late: list[list[float]], usual: list[int]) -> RankTimes:
    own = [ranks[number].steps[index] for index in usual]
    mine = [each[number] for each in late if each[number] > 0 and each[number] == max(each)]
    by_step = _by_step(ranks)
    waited = [_late_ranks(by_step[index][number], _last_arrivals(by_step[index])) for index in usual]

    def mean(value: Callable[[Step], float]) -> float:
        return statistics.fmean(map(value, own))

    return RankTimes(
        rank=ranks[number].rank,
        host=ranks[number].host,
        step=mean(lambda step: step.total),
        input=mean(lambda step: step.input) if any(step.arrived is not None for step in own) else None,
        compute=mean(lambda step: step.compute),
        exposed=mean(lambda step: step.waiting),
        late_ranks=statistics.fmean(waited),
        between=mean(lambda step: step.between),
        last=len(mine) / len(late),
        late=statistics.median(mine) if mine else 0.0,
    )


def _by_step(ranks: Sequence[RankSteps]) -> list[tuple[Step, ...]]:
    return list(zip(*(each.steps for each in ranks)))


def _last_arrivals(steps: Sequence[Step]) -> dict[str, float]:
    return {name: max(moments) for name, moments in _arrivals(steps).items()}


def _late_ranks(step: Step, last: dict[str, float]) -> float:
    """Returns the part of a step's exposed communication before the last rank came."""
    groups = waits.rounds(_inside(step))
    before = [(group[-1].submitted, last[name]) for name, group in groups.items() if name in last]
    return waits.seconds(part for wait in step.exposed for part in waits.clipped(waits.union(before), *wait))


def _is_straggler(one: RankTimes, ranks: int, step: float) -> bool:
    return ranks > 1 and one.last > _OFTEN * (1 + 1 / ranks) and one.late > max(_LATE_SECONDS, _LATE_PART * step)


def _straggler(one: RankTimes, times: Sequence[RankTimes]) -> Straggler:
    causes = {}
    for part in PARTS:
        others = [getattr(each, part) or 0.0 for each in times if each is not one]
        more = (getattr(one, part) or 0.0) - statistics.median(others)
        if more > _EXPLAINS * one.late:
            causes[part] = more
    longest_first = dict(sorted(causes.items(), key=lambda item: -item[1]))
    return Straggler(one.rank, one.host, one.last, one.late, longest_first)


def _buckets(ranks: Sequence[RankSteps]) -> list[Bucket]:
    """Returns the collectives that all ranks have, those first that take the most time in all steps together."""
    found: dict[str, list[tuple[str, int, float, float]]] = {}
    for steps in _by_step(ranks):
        named = [{one.name: one for one in _inside(step)} for step in steps]
        for name in named[0]:
            if all(name in each for each in named) and not waits.tells_rows(name):
                every = [each[name] for each in named]
                ready = [one.submitted for one in every]
                took = max(one.finished for one in every) - max(ready)
                largest = max(every, key=lambda one: one.bytes)
                found.setdefault(name, []).append((largest.kind, largest.bytes, took, max(ready) - min(ready)))
    rows = [
        Bucket(
            name,
            each[0][0],
            max(row[1] for row in each),
            statistics.median(row[2] for row in each),
            statistics.median(row[3] for row in each),
            len(each),
        )
        for name, each in found.items()
    ]
    return sorted(rows, key=lambda row: -row.seconds * row.steps)
