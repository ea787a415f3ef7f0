"""A training of simulated ranks (simulated_job.py): exact arithmetic, to be compared with that of one process."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace

import simulated_mesh
import simulated_newcomers
from simulated_engine import Killed
from simulated_job import Rank, this_rank

from keras_ddl import communicator
from keras_ddl.communicator.newcomers import history
from keras_ddl.errors import RankLostError
from keras_ddl.resilience import job
from keras_ddl.strategy import Strategy, fits
from keras_ddl.strategy.job import Job

PRIME = 1_000_003
ROWS = 7


def fit(
    calls: int, collectives: int, fits: int = 1, *, regroups: bool = False, model_size: int = 0
) -> Callable[[Rank], None]:
    """Returns a program that makes `calls` calls of a step of so many collectives, with a collective after each, in as
    many calls of fit. regroups: the last rank ends after the first fit; the program of the others regroups.
    model_size: ranks of the model axis of a mesh; 0: there is none.
    """

    def program(rank: Rank) -> None:
        simulated_newcomers.begin(rank)
        topology = communicator.topology()
        job_of_strategy = SimpleNamespace(shards_from_elements=None, epoch=0)
        job_of_strategy.renew = lambda new: Job.renew(job_of_strategy, new)
        place = SimpleNamespace(rank=0, size=0)
        rank.strategy = SimpleNamespace(topology=topology, job=job_of_strategy, random_state=place, saves=place)
        rank.strategy.mesh_layout = None
        rank.strategy.renew = lambda new: Strategy.renew(rank.strategy, new)
        if model_size:
            simulated_mesh.begin(rank, rank.strategy, model_size)
        rank.survival = job.ContinuingJob()
        history.recover_by(lambda *call: this_rank().survival.repeat(*call))
        model = simulated_newcomers.Model(rank)
        bounds = [calls * number // fits for number in range(fits + 1)]
        for first, end in pairwise(bounds):
            rank.log += rank.survival.call_of_trainer(
                "fit", model, lambda first=first, end=end: _fit(model, first, end, collectives)
            )
            if regroups and rank.number == rank.job.size - 1:
                _die_when_the_others_wait_in(rank, "between")
            if regroups:
                try:
                    communicator.barrier("between")
                except RankLostError:
                    communicator.regroup()
        if model_size:
            rank.variable.check()

    return program


def _die_when_the_others_wait_in(rank: Rank, name: str) -> None:
    others = [rank.job.ranks[each] for each in rank.job.regrouping.membership.members if each != rank.number]
    rank.pause(("look", lambda: all(each.at and f"barrier/{name}" in str(each.at) for each in others)))
    rank.die()
    raise Killed


def _fit(model: simulated_newcomers.Model, first: int, end: int, collectives: int) -> list[int]:
    """Trains on some batches; a newcomer on those that the others have not trained on. Returns what all steps have
    returned.
    """
    rank = model.rank
    rank.first_batch = first
    own = rank.survival
    with fits.running(model) as loop:
        callbacks = simulated_newcomers.Callbacks(model)
        loop.followers.append(callbacks)
        if first:
            communicator.barrier("begin")  # what all agree on in on_train_begin
        own.joining.begin_fit(callbacks)
        own.joining.begin_epoch()
        for number in range(rank.first_batch, end):
            own.joining.between_steps(rank.caller)
            own.joining.check_batch(number)
            returned = own.call(
                lambda number=number: _step(rank, number, collectives),
                lambda: [rank.state, rank.iterations],
                rank.caller,
            )
            callbacks.position = 0, number + 1, None
            callbacks.seen.returned.append(returned)
            seen = communicator.all_gather_object((number, returned))  # of a callback, say
            assert set(seen) == {(number, returned)}, seen
        own.joining.end_fit()
        return callbacks.seen.returned


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
