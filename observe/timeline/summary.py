"""Summarizes timelines: where each rank's time goes in a step, which rank the others wait for, slow collectives.

Parts of a step are means, so that they add up. The means leave out unusually long steps, in which TensorFlow traces or
the program waits for a disk. A rank's lateness and the duration of a collective are medians. All times are seconds.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from keras_ddl.timeline import waits
from keras_ddl.timeline.files import Collective
from keras_ddl.timeline.steps import RankSteps, Step

# A step that takes this many times the median is left out of means.
_UNUSUAL = 10
# A straggler is last in more than this share of the steps (adjusted for few ranks, one of which is often last by
# chance), by more than these seconds and this share of a step.
_OFTEN = 0.5
_LATE_SECONDS = 0.5e-3
_LATE_SHARE = 0.02
# A part of a step is reported as a cause if it explains this share of the lateness.
_EXPLAINS = 0.3
PARTS = {"input": "input", "compute": "computing", "between": "time between steps"}


@dataclass(frozen=True)
class RankTimes:
    """The times of a rank in a step.

    Attributes:
        step: from the beginning of a step to the beginning of the next.
        input: until the batch was ready; None if unknown.
        compute: the rest.
        exposed: waiting for communication.
        late_ranks: the part of `exposed` spent waiting for later ranks.
        between: in Keras and callbacks between two steps.
        last: the share of the steps in which this rank was last.
        late: median delay in these steps.
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

    Attributes:
        last, late: as in RankTimes.
        causes: part of a step -> how much longer it takes than the median of the others.
    """

    rank: int
    host: str
    last: float
    late: float
    causes: dict[str, float]


@dataclass(frozen=True)
class Bucket:
    """A collective of the steps.

    Attributes:
        seconds: from its submission on the last rank until the last rank has its result.
        ranks_apart: from its submission on the first rank to its submission on the last.
    """

    name: str
    kind: str
    bytes: int
    seconds: float
    ranks_apart: float
    steps: int


@dataclass(frozen=True)
class Summary:
    """The figures of `keras-ddl trace summary`.

    Attributes:
        unusual: number of steps left out of the means.
        step, exposed, late_ranks: means over the ranks.
    """

    steps: int
    unusual: int
    step: float
    exposed: float
    late_ranks: float
    ranks: list[RankTimes]
    stragglers: list[Straggler]
    buckets: list[Bucket]


def summarize(ranks: Sequence[RankSteps]) -> Summary:
    """Returns the summary of the steps that `steps.read` returns."""
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
    """Returns for each step how late each rank was.

    This is the sum, over the rounds in which the rank was the last to submit, of its delay to the others' median.
    """
    by_step = []
    for steps in _by_step(ranks):
        late = [0.0] * len(ranks)
        for arrivals in _arrivals(steps).values():
            last = max(range(len(ranks)), key=arrivals.__getitem__)
            others = [moment for number, moment in enumerate(arrivals) if number != last]
            if others:
                late[last] += arrivals[last] - statistics.median(others)
        by_step.append(late)
    return by_step


def _arrivals(steps: Sequence[Step]) -> dict[str, list[float]]:
    """Returns round -> when each rank submitted the round's last collective, for the rounds that all ranks have."""
    last = [{name: group[-1].submitted for name, group in waits.rounds(_inside(step)).items()} for step in steps]
    return {name: [each[name] for each in last] for name in last[0] if all(name in each for each in last)}


def _inside(step: Step) -> list[Collective]:
    return [one for one in step.collectives if one.submitted <= step.end]


def _usual(ranks: Sequence[RankSteps]) -> list[int]:
    """Returns the indices of the steps that count in the means."""
    longest = [max(step.total for step in steps) for steps in _by_step(ranks)]
    limit = _UNUSUAL * statistics.median(longest)
    return [index for index, seconds in enumerate(longest) if seconds <= limit]


def _times(number: int, ranks: Sequence[RankSteps], late: list[list[float]], usual: list[int]) -> RankTimes:
    own = [ranks[number].steps[index] for index in usual]
    mine = [each[number] for each in late if each[number] > 0 and each[number] == max(each)]
    by_step = _by_step(ranks)
    waited = [_late_ranks(by_step[index], number) for index in usual]

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


def _late_ranks(steps: Sequence[Step], number: int) -> float:
    """Returns the part of a rank's exposed communication in a step before the last rank had submitted."""
    before = waits.union((arrivals[number], max(arrivals)) for arrivals in _arrivals(steps).values())
    return waits.seconds(part for wait in steps[number].exposed for part in waits.clipped(before, *wait))


def _is_straggler(one: RankTimes, ranks: int, step: float) -> bool:
    return ranks > 1 and one.last > _OFTEN * (1 + 1 / ranks) and one.late > max(_LATE_SECONDS, _LATE_SHARE * step)


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
    """Returns the collectives that all ranks have, the largest total time first."""
    samples: dict[str, list[tuple[str, int, float, float]]] = {}
    for steps in _by_step(ranks):
        named = [{one.name: one for one in _inside(step)} for step in steps]
        for name in named[0]:
            if all(name in each for each in named) and not named[0][name].role.begins_step:
                every = [each[name] for each in named]
                ready = [one.submitted for one in every]
                took = max(one.finished for one in every) - max(ready)
                largest = max(every, key=lambda one: one.bytes)
                samples.setdefault(name, []).append((largest.kind, largest.bytes, took, max(ready) - min(ready)))
    rows = [
        Bucket(
            name,
            each[0][0],
            max(row[1] for row in each),
            statistics.median(row[2] for row in each),
            statistics.median(row[3] for row in each),
            len(each),
        )
        for name, each in samples.items()
    ]
    return sorted(rows, key=lambda row: -row.seconds * row.steps)
