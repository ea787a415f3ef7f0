"""Lost ranks in every schedule of three ranks, and in random schedules of more ranks (simulated_job.py).

Whichever rank is killed at any time, the remaining ranks return and write the results of one process, no rank waits
forever, and if too few ranks remain, all end.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from simulated_fit import alone, fit
from simulated_job import Choice, Job, simulated, started
from simulated_mesh import simulated_mesh
from simulated_newcomers import Board, simulated_newcomers

from keras_ddl.communicator.newcomers.history import Record, Replay

STEPS_TO_JOIN = 4  # a newcomer that asks earlier than this before the end of a fit joins


@pytest.fixture(autouse=True)
def _simulated() -> Iterator[None]:
    with simulated(), simulated_newcomers(), simulated_mesh():
        yield


@dataclass(frozen=True)
class Case:
    """A job, and how many of its ranks are killed or hang."""

    size: int = 3
    least: int = 1
    calls: int = 2
    collectives: int = 2
    fits: int = 1
    kills: int = 1
    stops: int = 0
    newcomers: int = 0
    spares: int = 0
    leaves: int = 0  # number of ranks that are asked to leave
    regroups: bool = False  # the program regroups between fits
    model_size: int = 0  # of the mesh; 0: no mesh
    is_late: bool = False  # there are no choices until a newcomer asks to join

    def begin(self) -> Job:
        program = fit(self.calls, self.collectives, self.fits, regroups=self.regroups, model_size=self.model_size)
        job = started(self.size, self.least, program, self.newcomers, self.spares)
        if self.newcomers or self.spares or self.leaves:
            job.board = Board()
        return job

    def options(self, job: Job, done: list[Choice]) -> list[Choice]:
        """Returns the possible choices after `done`; none if no rank lives."""
        if self.is_late and not job.board.asked_to_join:
            return sorted(job.options(()), key=lambda option: option[1] < self.size)[:1]
        kills, stops = (sum(what == each for what, _ in done) for each in ("kill", "stop"))
        options = job.options(range(len(job.ranks)) if kills < self.kills else ())
        alive = [rank for rank in job.ranks if rank.lives]
        if not options and alive:
            if job.can_wait():
                options = [("time", 0)]
            elif job.is_stopping:
                options = [("end", rank.number) for rank in alive[:1]]
            elif not any(rank.stopped for rank in alive):
                raise AssertionError(f"ranks wait forever: {[(rank.number, rank.at) for rank in alive]}")
        elif stops < self.stops:
            options += [("stop", rank.number) for rank in alive if not rank.stopped]
        if options and sum(what == "leave" for what, _ in done) < self.leaves:
            options += [("leave", rank) for rank in job.regrouping.membership.members if job.ranks[rank].lives]
        return options + [("resume", rank.number) for rank in alive if rank.stopped]

    def check(self, job: Job, done: list[Choice]) -> None:
        """Checks the results of a job that has ended."""
        expected = alone(self.calls, self.collectives)
        for rank in job.ranks:
            if rank.ended == "well":
                assert rank.log == expected[0], rank.number
                if not isinstance(rank.record, Replay):  # a newcomer that was not needed
                    assert (rank.state.value, rank.iterations.value) == (expected[1], self.calls), rank.number
        has_trained = not self.regroups and any(rank.ended == "well" for rank in job.ranks[: self.size])
        for number, steps in job.board.asked_to_join.items() if job.board and has_trained else ():
            is_rank = isinstance(job.ranks[number].record, Record)
            left_in_fit = self.calls // self.fits - steps
            # On a mesh it may have to wait for more newcomers.
            has_time = left_in_fit > STEPS_TO_JOIN and not self.model_size
            assert is_rank or ("kill", number) in done or not has_time, f"{number} did not join"
            if rank.ended == "left":
                has_place = not self.model_size  # another rank was lost while this one joined a mesh
                assert rank.log == [] and (("leave", rank.number) in done or not has_place)
        left = [rank for rank in job.ranks if rank.ended not in ("killed", "left")]
        if self.regroups:  # afterwards the job admits no newcomers
            left = [
                rank for rank in left if "which the other ranks have called" not in str(job.errors.get(rank.number))
            ]
        failed = [rank for rank in left if rank.ended != "well"]
        if not failed:
            assert len(left) >= self.least or job.is_stopping or not left
            return
        was_suspected = any(what == "resume" for what, _ in done)  # a suspected rank came back, so all end
        if self.model_size and not was_suspected:  # ranks were lost together, or the new mesh is too small, so all end
            reasons = [f"{rank.ended}: {job.errors[rank.number]}" for rank in failed]
            gone = sum(rank.ended in ("killed", "well") for rank in job.ranks)
            expected_reasons = ("were lost together", "min_ranks", "the launcher ends the job")
            assert gone > 1 and any(each in text for text in reasons for each in expected_reasons), reasons
            return
        assert all(rank.ended in ("RankLostError", "DeadlineError") for rank in failed), job.errors
        is_too_few = len(failed) < self.least
        assert is_too_few or was_suspected, job.errors


class Cut(Exception):
    """Ends a schedule whose rest is known."""


def run(case: Case, choose: Callable[[Job, list[Choice]], int]) -> Job:
    """Runs a job to its end; `choose(job, options)` makes the choices."""
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
    return job


def explore(case: Case) -> tuple[int, int]:
    """Runs every schedule up to a known state. Returns the numbers of schedules and of states."""
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


def wander(case: Case, seed: int) -> Job:
    """Runs a random schedule in which deaths are rare, because otherwise most schedules would end early."""
    rng = random.Random(seed)

    def choose(_: Job, options: list[Choice]) -> int:
        is_rare = [what in ("kill", "stop") for what, _ in options]
        return rng.choices(range(len(options)), [0.04 if rare else 1.0 for rare in is_rare])[0]

    return run(case, choose)


@pytest.mark.long
def test_every_schedule_of_three_ranks_losing_one() -> None:
    schedules, states = explore(Case(collectives=1))
    assert schedules > 1000 and states > 500


def test_random_schedules() -> None:
    """Includes more ranks, more deaths, and ranks that hang and may come back."""
    for seed in range(25):
        wander(Case(size=5, calls=3, kills=4), seed)
        wander(Case(size=4, kills=2, stops=1), seed)
        wander(Case(size=4, kills=2, least=3), seed)


@pytest.mark.long
def test_every_schedule_of_two_ranks_and_a_newcomer() -> None:
    schedules, states = explore(Case(size=2, newcomers=1, collectives=1, kills=0))
    assert schedules > 200 < states


def test_random_schedules_with_newcomers() -> None:
    """Includes two newcomers at once, and newcomers that ask between and during several fits."""
    for seed in range(15):
        wander(Case(size=2, newcomers=1, calls=8, collectives=1), seed)
        wander(Case(size=2, newcomers=2, calls=9, collectives=1), seed)
        wander(Case(size=3, spares=1, calls=12, fits=2, collectives=1, kills=2), seed)


def test_random_schedules_with_ranks_that_leave() -> None:
    left = 0
    for seed in range(15):
        job = wander(Case(size=3, leaves=2, calls=9, collectives=1), seed)
        left += sum(rank.ended == "left" for rank in job.ranks)
        wander(Case(size=3, spares=1, leaves=2, calls=12, fits=2, collectives=1, kills=2), seed)
    assert left > 7


@pytest.mark.long
def test_every_schedule_of_a_mesh_losing_one_rank() -> None:
    schedules, states = explore(Case(calls=1, collectives=1, model_size=3))
    assert schedules > 300 < states


def test_random_schedules_of_a_mesh() -> None:
    left = 0
    for seed in range(15):
        job = wander(Case(size=4, model_size=2, collectives=1, calls=4, kills=1), seed)
        left += sum(rank.ended == "left" for rank in job.ranks)
        wander(Case(size=4, model_size=4, collectives=1, calls=4, kills=3), seed)
        wander(Case(size=6, model_size=2, collectives=1, calls=4, kills=3, least=2), seed)
    assert left > 4


def test_random_schedules_of_a_mesh_with_newcomers() -> None:
    """One of 2 x 2 ranks may be lost; then one leaves, and two or more newcomers get a place."""
    grown = 0
    for seed in range(15):
        job = wander(Case(size=4, model_size=2, newcomers=2, calls=9, collectives=1), seed)
        grown += len(job.regrouping.membership.members) > 4 or any(rank.ended == "left" for rank in job.ranks)
        wander(Case(size=2, model_size=2, spares=1, calls=12, fits=2, collectives=1, kills=2), seed)
    assert grown > 7


def test_newcomers_in_a_program_that_regroups() -> None:
    """Newcomers join before the program regroups, or end; the others continue."""
    joined = 0
    for seed in range(30):
        job = wander(Case(size=3, newcomers=1, calls=6, fits=2, collectives=1, kills=0, regroups=True), seed)
        joined += isinstance(job.ranks[3].record, Record)
        assert isinstance(job.ranks[3].record, Record) or 3 in job.errors or job.ranks[3].ended == "killed"
    assert 0 < joined < 30


@pytest.mark.long
@pytest.mark.parametrize(
    "case",
    [
        Case(size=2, newcomers=1, collectives=1, is_late=True),
        Case(leaves=1, collectives=1, kills=0),
        Case(calls=1, collectives=1, kills=2),
        Case(calls=1, collectives=1, kills=2, least=2),
        Case(calls=1, collectives=1, kills=0, stops=1),
        Case(calls=3),
        Case(calls=1, collectives=1, kills=2, model_size=3),
    ],
    ids=repr,
)
def test_every_schedule(case: Case) -> None:
    explore(case)


@pytest.mark.long
@pytest.mark.parametrize("start", range(0, 8000, 2000))
def test_thousands_of_random_schedules(start: int) -> None:
    for seed in range(start, start + 2000):
        wander(Case(size=5, calls=3, kills=4), seed)
        wander(Case(size=4, kills=2, stops=2), seed)
        wander(Case(size=6, kills=4, least=3, stops=1), seed)
        wander(Case(size=3, newcomers=1, spares=2, calls=12, fits=2, collectives=1, kills=3), seed)
        wander(Case(size=4, newcomers=1, spares=1, leaves=3, calls=12, fits=2, collectives=1, kills=2), seed)
        wander(Case(size=6, model_size=2, collectives=1, calls=4, kills=4), seed)
