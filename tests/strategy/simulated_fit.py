"""A training of simulated ranks (simulated_job.py): exact arithmetic, to be compared with that of one process."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

from keras_ddl import communicator
from keras_ddl.communicator import Communicator
from keras_ddl.strategy import Strategy, survival, trainer_calls
from keras_ddl.topology import make_topology
from strategy.simulated_job import Rank, open_world, this_rank

PRIME = 1_000_003
ROWS = 7


def fit(calls: int, collectives: int) -> Callable[[Rank], None]:
    """Returns a program that makes `calls` calls of a step of so many collectives, with a collective after each."""

    def program(rank: Rank) -> None:
        job = rank.job
        everybody = tuple(range(len(job.ranks)))
        topology = make_topology(rank.number, ["host"] * len(everybody))
        open_world(rank, topology, job.world(0, everybody))
        settings = SimpleNamespace(min_ranks=1)
        job_of_strategy = SimpleNamespace(shards_from_elements=None, epoch=0, settings=settings)
        place = SimpleNamespace(rank=0, size=0)
        rank.strategy = SimpleNamespace(topology=topology, job=job_of_strategy, random_state=place, saves=place)
        rank.strategy.renew = lambda new: Strategy.renew(rank.strategy, new)
        rank.survival = survival.Survival()
        Communicator.recover = lambda *call: this_rank().survival._collective(*call)
        with trainer_calls.TrainerCall(None).entered():
            for number in range(calls):
                returned = rank.survival.call(
                    lambda number=number: _step(rank, number, collectives),
                    lambda: [rank.state, rank.iterations],
                    rank.caller,
                )
                seen = communicator.all_gather_object((number, returned))  # of a callback, say
                assert set(seen) == {(number, returned)}, seen
                rank.log.append(returned)

    return program


def _step(rank: Rank, number: int, collectives: int) -> int:
    """A step on batch `number`: each rank has some of its rows; nothing is written before the last sum."""
    rank.caller._traces_before = rank.cut_step.traces
    comm = communicator.communicator_of(None)
    traces = not rank.has_trace
    comm.barrier(f"step {number}: {traces=}")  # what ranks agree on before they trace
    if traces:  # ranks trace together: those that do otherwise would not meet
        rank.cut_step.traces += 1
        rank.has_trace = True
    total = rank.state.value
    for each in range(collectives):
        rows = range(comm.rank, ROWS, comm.size)
        mine = sum((number + 1) * (row + 1) * (each + 2) * total for row in rows) % PRIME
        parts = comm.native().all_gather_bytes(mine, f"step {number}: sum {each}, {traces=}")
        total = (total + sum(parts)) % PRIME
    rank.state.assign((31 * rank.state.value + total) % PRIME)
    rank.iterations.assign(rank.iterations.value + 1)
    return total


def alone(calls: int, collectives: int) -> tuple[list[int], int]:
    """Returns what one process returns, and its state."""
    state, log = 1, []
    for number in range(calls):
        total = state
        for each in range(collectives):
            rows = sum((number + 1) * (row + 1) * (each + 2) * total for row in range(ROWS))
            total = (total + rows) % PRIME
        state = (31 * state + total) % PRIME
        log.append(total)
    return log, state
