"""What goes on when a rank is lost: the ranks that are left make the call again that has failed.

All ranks make the same calls, of steps and of collectives between them, in the same order. A step writes nothing before
its commit, every rank has all weights, and the batch of a step is kept until it has ended. So when a rank is lost, each
call was either finished by no rank, and is made again; or by some, who give the others what it has written and
returned. The traced program does not know how many ranks there are; it is cut again for those that are left.

Where rank 0 is lost, the lowest rank that is left is the new one, and its callbacks write from then on
(keras_patches/standby.py). Before the next call the ranks compare their weights.

Newcomers (joining.py) come between two steps, and get the state of all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, NamedTuple

import numpy as np

from keras_ddl import communicator, ops
from keras_ddl.communicator import Communicator, history, membership
from keras_ddl.compat.context import setting
from keras_ddl.compat.tensorflow import tf
from keras_ddl.errors import CollectiveError, DeadlineError, RankLostError
from keras_ddl.strategy import one_per_job, trainer_calls
from keras_ddl.strategy.interface import strategy_of
from keras_ddl.strategy.joining import Admission, Newcomer, give_up
from keras_ddl.strategy.step import accumulation
from keras_ddl.strategy.step.failing_together import Caller
from keras_ddl.topology import Topology

_AGAIN = object()
_ALONE = (
    "A newcomer (keras-ddl run --spares) joins the others between two steps of fit. Received: a step, or a collective "
    "in a callback, before the first step that it makes with them. Train in fit; or do without spares."
)
_in_call: ContextVar[bool] = ContextVar("keras_ddl_in_surviving_call", default=False)


class Report(NamedTuple):
    """What a rank says when the ranks that are left have met.

    Attributes:
        rank: its number before. finished: calls, by it; None: it is a newcomer without state.
        has_traced: the call that failed may have traced. is_between_steps: no call of it has failed.
    """

    rank: int
    finished: int | None
    has_traced: bool = False
    is_between_steps: bool = False


class Survival:
    """The calls of a job that goes on. Those of its main thread: what other threads call may fail.

    Attributes:
        joining: how newcomers join; None: the job takes none.
    """

    def __init__(self) -> None:
        self._finished: int | None = 0  # calls; None: a newcomer without state
        self._compares_at: int | None = None  # so many calls that all ranks have finished
        self._written: Callable[[], list[Any]] = list  # returns variables that the last of them may have written
        self._returned: Any = None
        recorded = history.of_job()
        self.joining: Admission | Newcomer | None = None
        if isinstance(recorded, history.Replay):
            self._finished, self.joining = None, Newcomer(recorded, self)
        elif recorded is not None:
            self.joining = Admission(recorded, self)
        Communicator.recover = self._collective

    def finished(self) -> int:
        """Returns how many calls this rank has finished, of those that all ranks make."""
        return self._finished or 0

    def call(
        self, run: Callable[[], Any], variables: Callable[[], list[Any]] = list, caller: Caller | None = None
    ) -> Any:
        """Returns `run()`, made again with the ranks that are left as often as some are lost. COLLECTIVE.

        Args:
            variables: returns those that it may write. caller: of the step that it runs, if it does.
        """
        if _in_call.get():
            return run()
        if self._finished is None:
            error = CollectiveError(_ALONE)
            if not isinstance(history.of_job(), history.Replay):  # it is one of the ranks already
                give_up(error)
            raise error
        if self.joining is not None:
            self.joining.look()
        with setting(_in_call, True):
            while True:
                try:
                    self._compare()
                    returned = run()
                except (RankLostError, DeadlineError) as error:
                    returned = self._go_on(error, variables, caller)
                    if returned is _AGAIN:
                        continue
                self._finished += 1
                self._written, self._returned = variables, returned
                return returned

    def between_steps(self, caller: Caller) -> None:
        """Admits newcomers, before a step of fit, if it is time. COLLECTIVE then."""
        if self.joining is not None:
            self.joining.between_steps(caller)

    def check_batch(self, batch: Any) -> None:
        """Checks that newcomers read what the others read, before their first step. COLLECTIVE then."""
        if self.joining is not None:
            self.joining.check_batch(batch)

    def admit(self, newcomers: Sequence[int], caller: Caller) -> bool:
        """Meets newcomers, whom rank 0 names, and gives them the state. COLLECTIVE over them, too.

        Returns whether they are members now, or lost; False: they wait.
        """
        admits: Sequence[int] = newcomers
        before = communicator.rank()
        with not_again():
            while True:
                try:
                    reports = self._meet(admits, Report(before, self._finished, is_between_steps=True))
                    too_few = self._too_few(len(reports))
                    if too_few is None:
                        self._catch_up(reports, list, caller)
                        self._succeed(before, may_lack_last=True)
                except (RankLostError, DeadlineError) as error:
                    if not communicator.is_initialized() or self._refusal(caller) or getattr(error, "has_left", False):
                        raise
                    admits = ()
                    continue
                if too_few is not None:
                    raise too_few
                return all(each.is_between_steps or each.finished is None for each in reports)

    def receive(self, meet: Callable[[], Topology]) -> None:
        """In a newcomer: gets the state from the ranks that it meets. COLLECTIVE over all."""
        with not_again():
            while True:
                try:
                    self._renew(meet())
                    self._catch_up(self._exchange(Report(-1, None)), list, None)
                    return
                except RankLostError:
                    if not communicator.is_initialized():
                        raise
                    meet = communicator.regroup

    def has_joined(self, finished: int, admission: Admission) -> None:
        """This newcomer is a rank now, and has the state after so many calls."""
        self._finished, self.joining = finished, admission

    def begin_fit(self, callbacks: Any) -> None:
        """Training begins, after on_train_begin of all callbacks; a newcomer becomes a rank. COLLECTIVE then."""
        if self.joining is not None:
            self.joining.begin_fit(callbacks)

    def begin_epoch(self) -> bool:
        """Whether this rank begins an epoch in which the others already are."""
        return self.joining is not None and self.joining.begin_epoch()

    def end_fit(self) -> None:
        """Training has ended."""
        if self.joining is not None:
            self.joining.end_fit()

    def _compare(self) -> None:
        """After a loss, has the ranks compare their weights where all of them are between the same two calls."""
        if self._compares_at is not None and self._compares_at == self._finished:
            for each in trainer_calls.followers():
                each.compare()
            self._compares_at = None

    def _collective(self, call: Callable[[Communicator], Any], variables: Callable[[], list[Any]] = list) -> Any:
        # Outside of fit, evaluate and predict a program may exchange what each rank has for itself.
        if not trainer_calls.running() or threading.current_thread() is not threading.main_thread():
            return call(communicator.communicator_of(None))
        return self.call(lambda: call(communicator.communicator_of(None)), variables)

    def _refusal(self, caller: Caller | None) -> bool:
        """Whether only the lost rank had something."""
        has_shards = any(each.job.shards_from_elements is not None for each in self._strategies())
        return has_shards or accumulation.is_in_parts() or (caller is not None and caller.cut_step.draws_in_kernels())

    def _too_few(self, ranks: int) -> RankLostError | None:
        for each in self._strategies():
            if ranks < each.job.settings.min_ranks:
                return RankLostError(
                    "fit goes on with as many ranks as Strategy(min_ranks=...) says. Received: "
                    f"{ranks} left, and min_ranks={each.job.settings.min_ranks} (rank {each.rank}). Restart the job "
                    "(keras-ddl run --restarts), or make the number smaller."
                )
        return None

    def _strategies(self) -> list[Any]:
        place = communicator.topology()
        return [each for each in one_per_job.alive() if each.topology is place]

    def _go_on(self, error: Exception, variables: Callable[[], list[Any]], caller: Caller | None) -> Any:
        # One that has left by itself is missed by a program that is wrong.
        if self._refusal(caller) or getattr(error, "has_left", False):
            raise error
        before, size = communicator.rank(), communicator.size()
        has_traced = caller is not None and caller.may_have_traced(is_python=False)
        while True:
            try:
                reports = self._meet(None, Report(before, self._finished, has_traced))
                old = sorted(each.rank for each in reports if each.finished is not None)
                if len(old) == size or (old[0] != 0 and _gathers_on_rank_0()):
                    break
                if (too_few := self._too_few(len(reports))) is not None:
                    error = too_few
                    break
                returned = self._catch_up(reports, variables, caller)
                # Where some have finished this call, rank 0 had begun it, and had written all that came before.
                self._succeed(before, may_lack_last=returned is _AGAIN)
                return returned
            except (RankLostError, DeadlineError):
                if not communicator.is_initialized():
                    raise
        raise error

    def _succeed(self, before: int, *, may_lack_last: bool) -> None:
        """This rank, whose number was `before`, writes from now on, if it is rank 0."""
        if communicator.rank() == 0 and before != 0:
            for follower in trainer_calls.followers():
                follower.become_first(may_lack_last=may_lack_last)

    def _meet(self, admits: Sequence[int] | None, mine: Report) -> list[Report]:
        strategies = self._strategies()
        topology = communicator.regroup_with(admits)
        for each in strategies:
            each.renew(topology)
        return self._exchange(mine)

    def _renew(self, topology: Topology) -> None:
        for each in one_per_job.alive():
            each.renew(topology)

    def _exchange(self, mine: Report) -> list[Report]:
        return communicator.all_gather_object(mine, name="keras_ddl/survival/finished")

    def _catch_up(self, reports: list[Report], variables: Callable[[], list[Any]], caller: Caller | None) -> Any:
        """Returns what the call has returned on ranks that have finished it; _AGAIN: this rank is to make it."""
        calls = [each.finished for each in reports]
        if calls.count(None) == len(calls):
            raise RankLostError("All ranks that had the state of the training are lost.")
        most = self._compares_at = max(each for each in calls if each is not None)
        returned = _AGAIN
        if any(each not in (None, most) for each in calls):
            returned = self._share_last_call(calls.index(most), self._finished not in (None, most), variables)
        elif caller is not None and any(each.has_traced for each in reports):
            caller.forget_traces()  # all are in the same call, which some may have traced
        if None in calls:
            assert self.joining is not None
            self.joining.share_state(calls.index(most))
        return returned

    def _share_last_call(self, root: int, is_behind: bool, variables: Callable[[], list[Any]]) -> Any:
        """Gives ranks that are behind, of which this is one or not, what rank `root` has written and returned."""
        written = variables() if is_behind else self._written()
        before = [(each, tf.identity(tf.convert_to_tensor(each))) for each in written if is_behind]
        try:
            if written:
                ops.broadcast_variables(written, root=root)
            returned = tf.nest.map_structure(_sent, self._returned) if communicator.rank() == root else None
            returned = communicator.broadcast_object(returned, root, name="keras_ddl/survival/returned")
        except BaseException:  # the root is lost, too: what has come of its state may never be complete
            for variable, value in before:
                variable.assign(value)
            raise
        return tf.nest.map_structure(_received, returned) if is_behind else _AGAIN


def not_again() -> AbstractContextManager[None]:
    """Returns the context of a call of which a lost rank has a part that no other has: it is not made again."""
    return setting(_in_call, True)


def _gathers_on_rank_0() -> bool:
    """Whether rank 0 alone has the predictions of all ranks."""
    loops = (call for call in trainer_calls.running() if isinstance(call, trainer_calls.Loop))
    strategies = (strategy_of(loop.model) for loop in loops if loop.method == "predict")
    return any(each is not None and each.job.settings.gather_predictions == "rank0" for each in strategies)


class _Sent:
    """A tensor on its way to another rank."""

    def __init__(self, value: np.ndarray) -> None:
        self.value = value


def _sent(leaf: Any) -> Any:
    return _Sent(leaf.numpy()) if tf.is_tensor(leaf) else leaf


def _received(leaf: Any) -> Any:
    return tf.constant(leaf.value) if isinstance(leaf, _Sent) else leaf


_of_job: Survival | None = None


def of_job() -> Survival | None:
    """Returns what makes calls again, in a job that may go on without a lost rank; None: one that ends."""
    global _of_job
    if _of_job is None and communicator.size() > 1 and membership.can_ask():
        _of_job = Survival()
    return _of_job
