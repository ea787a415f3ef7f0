"""A training of simulated ranks (simulated_job.py) with exact arithmetic, to compare it with one process."""

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
from keras_ddl.strategy import Strategy
from keras_ddl.strategy.calls import fits
from keras_ddl.strategy.job import Job

PRIME = 1_000_003
ROWS = 7


def fit(
    calls: int, collectives: int, fits: int = 1, *, regroups: bool = False, model_size: int = 0
) -> Callable[[Rank], None]:
    """Returns a program that calls a step `calls` times in `fits` fits; each step makes `collectives` collectives, and
    one more follows it. regroups: the last rank ends after the first fit, and the other ranks regroup.
    model_size: model ranks of the mesh; 0: no mesh.
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
                _die_while_others_wait_in(rank, "between")
            if regroups:
                try:
                    communicator.barrier("between")
                except RankLostError:
                    communicator.regroup()
        if model_size:
            rank.variable.check()

    return program


def _die_while_others_wait_in(rank: Rank, name: str) -> None:
    others = [rank.job.ranks[each] for each in rank.job.regrouping.membership.members if each != rank.number]
    rank.pause(("look", lambda: all(each.at and f"barrier/{name}" in str(each.at) for each in others)))
    rank.die()
    raise Killed


def _fit(model: simulated_newcomers.Model, first: int, end: int, collectives: int) -> list[int]:
    """Trains on some batches, as a newcomer on those that the others have not trained on. Returns the results of all
    steps.
    """
    rank = model.rank
    rank.first_batch = first
    own = rank.survival
    with fits.running(model) as loop:
        callbacks = simulated_newcomers.Callbacks(model)
        loop.followers.append(callbacks)
        if first:
            communicator.barrier("begin")  # stands for what ranks agree on in on_train_begin
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
            seen = communicator.all_gather_object((number, returned))  # stands for a callback's collective
            assert set(seen) == {(number, returned)}, seen
        own.joining.end_fit()
        return callbacks.seen.returned


def _step(rank: Rank, number: int, collectives: int) -> int:
    """Runs a step on this rank's rows of batch `number`; it writes nothing before the last sum."""
    rank.caller._traces_before = rank.cut_step.traces
    comm = communicator.communicator_of(None)
    traces = not rank.has_trace
    comm.barrier(f"step {number}: {traces=}")  # stands for what ranks agree on before they trace
    if traces:  # all ranks must trace together, or their names differ
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
    """Returns the results and the state of one process."""
    state, log = 1, []
    for number in range(calls):
        total = state
        for each in range(collectives):
            rows = sum((number + 1) * (row + 1) * (each + 2) * total for row in range(ROWS))
            total = (total + rows) % PRIME
        state = (31 * state + total) % PRIME
        log.append(total)
    return log, state
