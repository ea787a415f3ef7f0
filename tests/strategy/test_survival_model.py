"""What ranks do when some are lost, in every schedule of three of them, and in random ones of more (simulated_job.py).

Whatever is killed, and whenever: the ranks that are left end with what one process returns and writes, nobody waits for
ever, and where too few are left all end.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from strategy.simulated_fit import alone, fit
from strategy.simulated_job import Choice, Job, simulated, started


@pytest.fixture(autouse=True)
def _simulated() -> Iterator[None]:
    with simulated():
        yield


@dataclass(frozen=True)
class Case:
    """A job, and how many of its ranks are killed or stand still."""

    size: int = 3
    least: int = 1
    calls: int = 2
    collectives: int = 2
    kills: int = 1
    stops: int = 0

    def begin(self) -> Job:
        return started(self.size, self.least, fit(self.calls, self.collectives))

    def options(self, job: Job, done: list[Choice]) -> list[Choice]:
        """Returns what can happen after `done`. No rank lives: nothing."""
        kills, stops = (sum(what == each for what, _ in done) for each in ("kill", "stop"))
        options = job.options(range(self.size) if kills < self.kills else ())
        alive = [rank for rank in job.ranks if rank.lives]
        if not options and alive:
            if job.can_wait():
                options = [("time", 0)]
            elif job.is_stopping:
                options = [("end", rank.number) for rank in alive[:1]]
            elif not any(rank.stopped for rank in alive):
                raise AssertionError(f"they wait for ever: {[(rank.number, rank.at) for rank in alive]}")
        elif stops < self.stops:
            options += [("stop", rank.number) for rank in alive if not rank.stopped]
        return options + [("resume", rank.number) for rank in alive if rank.stopped]

    def check(self, job: Job, done: list[Choice]) -> None:
        """Checks how the job has ended."""
        expected = alone(self.calls, self.collectives)
        for rank in job.ranks:
            if rank.ended == "well":
                assert (rank.log, rank.state.value, rank.iterations.value) == (*expected, self.calls), rank.number
        left = [rank for rank in job.ranks if rank.ended != "killed"]
        failed = [rank for rank in left if rank.ended != "well"]
        if not failed:
            assert len(left) >= self.least or job.is_stopping or not left
            return
        assert all(rank.ended in ("RankLostError", "DeadlineError") for rank in failed), job.errors
        is_too_few = len(failed) < self.least
        was_suspected = any(what == "resume" for what, _ in done)  # and came back: all end
        assert is_too_few or was_suspected, job.errors


class Cut(Exception):
    """The rest of a schedule is known."""


def run(case: Case, choose: Callable[[Job, list[Choice]], int]) -> list[Choice]:
    """Runs a job to its end, by what `choose(job, options)` chooses. Returns its schedule."""
    job, done = case.begin(), []
    try:
        while options := case.options(job, done):
            done.append(options[choose(job, options) if len(options) > 1 else 0])
            job.do(done[-1])
        case.check(job, done)
    except AssertionError as error:
        raise AssertionError(f"{case}: {error}\nschedule: {done}") from error
    except Cut:
        pass
    finally:
        job.give_up()
    return done


def explore(case: Case) -> tuple[int, int]:
    """Runs every schedule, each up to a state that was seen. Returns how many, and the number of states."""
    todo: list[list[int]] = [[]]
    seen: set[object] = set()
    schedules = 0
    while todo:
        prefix, made = todo.pop(), []

        def choose(job: Job, options: list[Choice], prefix: list[int] = prefix, made: list[int] = made) -> int:
            if len(made) < len(prefix):
                made.append(prefix[len(made)])
                return made[-1]
            key = job.key(), tuple(options)
            if key in seen:
                raise Cut
            seen.add(key)
            todo.extend([*made, other] for other in range(1, len(options)))
            made.append(0)
            return 0

        run(case, choose)
        schedules += 1
    return schedules, len(seen)


def wander(case: Case, seed: int) -> list[Choice]:
    """Runs one schedule, chosen at random: rarely a death, or most schedules would be over soon."""
    rng = random.Random(seed)

    def choose(_: Job, options: list[Choice]) -> int:
        is_rare = [what in ("kill", "stop") for what, _ in options]
        return rng.choices(range(len(options)), [0.04 if rare else 1.0 for rare in is_rare])[0]

    return run(case, choose)


def test_every_schedule_of_three_ranks_of_which_one_is_lost() -> None:
    schedules, states = explore(Case(collectives=1))
    assert schedules > 1000 < 2 * states


def test_every_schedule_in_which_two_of_three_must_be_left() -> None:
    explore(Case(calls=1, collectives=1, least=2))


def test_schedules_at_random() -> None:
    """Of more ranks, with more deaths, also of ranks that stand still and may come back."""
    for seed in range(100):
        wander(Case(size=5, calls=3, kills=4), seed)
        wander(Case(size=4, kills=2, stops=1), seed)
        wander(Case(size=4, kills=2, least=3), seed)


@pytest.mark.long
@pytest.mark.parametrize(
    "case",
    [
        Case(calls=1, collectives=1, kills=2),
        Case(calls=1, collectives=1, kills=2, least=2),
        Case(calls=1, collectives=1, kills=0, stops=1),
        Case(calls=3),
    ],
    ids=repr,
)
def test_every_schedule(case: Case) -> None:
    explore(case)


@pytest.mark.long
@pytest.mark.parametrize("start", range(0, 8000, 2000))
def test_thousands_of_schedules_at_random(start: int) -> None:
    for seed in range(start, start + 2000):
        wander(Case(size=5, calls=3, kills=4), seed)
        wander(Case(size=4, kills=2, stops=2), seed)
        wander(Case(size=6, kills=4, least=3, stops=1), seed)
