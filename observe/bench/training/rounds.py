"""Runs jobs of 1, 2, ... ranks in turn, and summarizes their measurements.

Each round starts one job for every number of ranks, one after the other, so that changes of the machine's speed affect
all jobs alike. Figures are medians over the rounds.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from keras_ddl.bench.training.rank import Plan, Reached, Sample, measure
from keras_ddl.errors import ConfigError
from keras_ddl.launch.run_function import run


@dataclass(frozen=True)
class Row:
    """The results for one number of ranks. Seconds are medians over the rounds.

    Attributes:
        ranks, hosts: number of ranks and hosts of the job.
        batch: rows of all ranks together.
        step: seconds of a step on the slowest rank.
        rows_per_second: rows of all ranks per second.
        efficiency: 1 for one rank. Weak scaling: step of one rank / step. Strong scaling: the same / ranks.
        communication, exposed, waiting, lead: as in overlap.Traffic; None on one rank.
        wire: share of the gradients' bytes that were reduced before the backward pass ended; None on one rank.
        sharers: ranks that share a core; 1 if each has as many cores as it uses.
        reached: the training to an accuracy.
    """

    ranks: int
    hosts: int
    batch: int
    step: float
    rows_per_second: float
    efficiency: float
    communication: float | None
    exposed: float | None
    waiting: float | None
    lead: float | None
    wire: float | None
    sharers: float
    reached: Reached | None


@dataclass(frozen=True)
class Measurements:
    """A row for each number of ranks, and the figures common to all."""

    rows: list[Row]
    gradient_bytes: int
    machine: str


def measured(
    plan: Plan, ranks: Sequence[int], rounds: int, hosts: str | None = None, say: Callable[[str], object] = print
) -> Measurements:
    """Runs the jobs of all rounds. say: called with a message when a job begins."""
    samples: dict[int, list[list[Sample]]] = {count: [] for count in ranks}
    for turn in range(rounds):
        for count in ranks:
            say(f"round {turn + 1} of {rounds}: {count} rank{'s' if count > 1 else ''}")
            train = plan.to_accuracy is not None and turn == 0
            environment = {"TF_CPP_MIN_LOG_LEVEL": "2"}
            samples[count].append(run(measure, count, (plan, train), hosts=_part(hosts, count), env=environment))
    return summary(plan, samples)


def summary(plan: Plan, samples: dict[int, list[list[Sample]]]) -> Measurements:
    """Returns the medians. samples: samples by number of ranks, round and rank."""
    steps = {
        count: statistics.median(max(sample.step for sample in one) for one in turns)
        for count, turns in samples.items()
    }
    alone, rows = steps[1], []
    for count, turns in samples.items():
        first = turns[0][0]
        columns = list(zip(*(turn[0].traffic for turn in turns if turn[0].traffic is not None)))
        communication, exposed, waiting, lead, _, wire = [statistics.median(one) for one in columns][:6] or [None] * 6
        needed = plan.cores * count / first.hosts
        rows.append(
            Row(
                count,
                first.hosts,
                plan.global_batch(count),
                steps[count],
                plan.global_batch(count) / steps[count],
                alone / steps[count] / (count if plan.strong else 1),
                communication,
                exposed,
                waiting,
                lead,
                wire,
                max(1.0, needed / first.cores),
                first.reached,
            )
        )
    last = samples[max(samples)][0][0]
    return Measurements(rows, last.gradient_bytes, last.machine)


def _part(hosts: str | None, count: int) -> str | None:
    """Returns the hosts for `count` ranks, filling the first hosts first: "h0:4,h1:2" for 6 ranks of "h0:4,h1:4".

    Raises: ConfigError: the hosts have fewer slots.
    """
    if hosts is None:
        return None
    taken, left = [], count
    for host in hosts.split(","):
        name, _, slots = host.partition(":")
        places = min(left, int(slots) if slots.isdigit() else 1)
        if places:
            taken.append(f"{name}:{places}")
        left -= places
    if left:
        raise ConfigError(
            f"bench train: --hosts must have slots for all ranks. Received: --hosts {hosts} for {count} ranks."
        )
    return ",".join(taken)
