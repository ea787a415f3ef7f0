"""Continues when a rank is lost: the remaining ranks repeat the failed call.

All ranks make the same calls, of steps and of collectives between steps, in the same order. A step writes nothing
before its commit, every rank has all weights, and the batch of a step is kept until the step has ended. So when a rank
is lost, either no rank has finished the call, and all repeat it, or some have, and they send the others what the call
wrote and returned. The traced program does not know how many ranks there are; it is cut again for the remaining ranks.

If rank 0 is lost, the lowest remaining rank becomes rank 0, and its callbacks write from then on
(keras_ddl/strategy/keras_patches/standby.py). Before the next call the ranks compare their weights.

On a mesh, the remaining ranks and newcomers form another mesh (remeshing.py); ranks without a place leave.

Newcomers (joining.py) join between two steps and receive the state of the job.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import numpy as np

from keras_ddl import communicator
from keras_ddl.communicator import Communicator
from keras_ddl.communicator.newcomers import history
from keras_ddl.compat.context import setting
from keras_ddl.compat.tensorflow import tf
from keras_ddl.errors import CollectiveError, ConfigError, DeadlineError, RankLostError, RankMismatchError
from keras_ddl.resilience import remeshing, sharing_out
from keras_ddl.resilience.joining_base import Joining, give_up
from keras_ddl.resilience.survival_errors import (
    OWN_COLLECTIVE,
    PREDICTIONS,
    TooFewError,
    gathers_on_rank_0,
    with_reason,
)
from keras_ddl.state.generations import Generations
from keras_ddl.state.replicate import replicate
from keras_ddl.strategy import one_per_job
from keras_ddl.strategy.base import BaseStrategy
from keras_ddl.strategy.calls import trainer_calls
from keras_ddl.strategy.resilience import Resilience
from keras_ddl.strategy.shards import sharded_slots
from keras_ddl.strategy.step.failing_together import Caller
from keras_ddl.topology import Topology

_ALONE = (
    "A rank that joins a running job (keras-ddl run --spares) can join only between two steps of fit. Received: a "
    "step, or a collective in a callback, before the first step of fit that it shares with the other ranks. Train only "
    "in fit, or start the job without --spares."
)
_in_call: ContextVar[bool] = ContextVar("keras_ddl_in_surviving_call", default=False)


class Report(NamedTuple):
    """A rank's report when the remaining ranks meet.

    Attributes:
        rank: its earlier number.
        finished: how many calls it has finished; None: it is a newcomer without state.
        has_traced: the failed call may have traced; None: this rank has finished the call, because others had, and has
            not begun the next one.
        has_met_newcomers: in the current admission.
        is_on_trial: it has come as a newcomer.
        leaving: {launcher's number of a rank to leave: reason}, known to rank 0.
    """

    rank: int
    finished: int | None
    has_traced: bool | None = False
    has_met_newcomers: bool = False
    is_on_trial: bool = False
    leaving: Mapping[int, str] = {}


class Survival(Resilience):
    """The calls of a job that continues. Only calls of the main thread count; calls of other threads may fail.

    Attributes:
        joining: how newcomers join.
        has_met_newcomers: whether the last admission met newcomers.
        on_trial: present numbers of ranks that have come as newcomers. Nobody can know whether they have state that the
            program itself keeps, for example in a closure. So they leave if they turn out to differ, and the others
            continue. Empty if no other ranks are left, because then the newcomers are the job.
    """

    joining: Joining

    def __init__(self) -> None:
        self._finished: int | None = 0  # calls; None: a newcomer without state
        self._compares_at: int | None = None  # number of finished calls at which ranks compare weights
        self._written: Callable[[], list[Any]] = list  # returns variables that the last call may have written
        self._returned: Any = None
        self._place, self._epoch = communicator.topology(), communicator.epoch()
        self.joining = Joining()
        self.has_met_newcomers = False
        self.on_trial: frozenset[int] = frozenset()
        is_new = isinstance(history.current(), history.Replay)
        self._generations = Generations(holds_nothing=is_new)
        if is_new:
            self._finished = None
        history.recover_by(self.repeat)

    @property
    def is_on_trial(self) -> bool:
        """Whether this rank has joined, and ranks that were there before are left."""
        return bool(self.on_trial) and communicator.rank() in self.on_trial

    def finished(self) -> int:
        return self._finished or 0

    def call(
        self, run: Callable[[], Any], variables: Callable[[], list[Any]] = list, caller: Caller | None = None
    ) -> Any:
        """Runs a call, and repeats it on the remaining ranks as long as ranks are lost. See `Resilience.call`."""
        if _in_call.get() or threading.current_thread() is not threading.main_thread():
            return run()
        if self._finished is None:
            error = CollectiveError(_ALONE)
            if not isinstance(history.current(), history.Replay):  # it has already joined
                give_up(error)
            raise error
        self.joining.look()
        if caller is None:  # a call inside hooks: standbys count earlier writes as done
            for each in trainer_calls.followers():
                each.flush()
        with setting(_in_call, True):
            self._follow()
            while True:
                try:
                    self._compare()
                    returned = run()
                except Exception as error:
                    is_lost = isinstance(error, (RankLostError, DeadlineError))
                    if not is_lost and not self._may_be_of_newcomers(error):
                        raise
                    if self.is_on_trial and not isinstance(error, RankLostError):
                        give_up(error)  # the others continue without it
                    if not self._continue(error, variables, caller):
                        continue
                else:
                    self._finish(variables, returned)
                return self._returned

    def _follow(self) -> None:
        """Lets the Strategies continue with the remaining ranks if the program itself has called `regroup`.

        The program must then deal with calls that some ranks have finished and others have not.
        """
        place, epoch = communicator.topology(), communicator.epoch()
        if place is self._place:
            return
        before, last_epoch = self._place, self._epoch
        self._place, self._epoch = place, epoch
        if epoch != last_epoch:
            for each in one_per_job.alive():
                if each.topology is before:
                    is_cut = each.mesh_layout is not None
                    if is_cut or each.job.shards_from_elements is not None:
                        argument = "layout" if is_cut else "sharding='optimizer'"
                        raise ConfigError(
                            f"Strategy({argument}) continues automatically when a rank is lost, but cannot continue "
                            "after keras_ddl.regroup(). Received: a step after keras_ddl.regroup() (rank "
                            f"{place.rank}). Do not catch RankLostError, or make the Strategy without "
                            f"{argument.partition('=')[0]}."
                        )
                    each.renew(place)
            self._finished = 0
            _prepare_plans()

    def _finish(self, variables: Callable[[], list[Any]], returned: Any) -> None:
        self._finished = self.finished() + 1
        self._written, self._returned = variables, returned

    def room_for(self, waiting: int, leaving: int) -> int:
        """Returns how many of `waiting` newcomers have a place after `leaving` ranks have left."""
        return sharing_out.room_for(waiting, leaving, self._strategies())

    def admit(self, newcomers: Sequence[int], leaving: Mapping[int, str], caller: Caller) -> bool:
        """Meets the newcomers that rank 0 names and gives them the state; ranks that rank 0 names leave. COLLECTIVE
        over all ranks, newcomers included.

        Returns True if they are members now, or lost. False: they wait, because a rank was lost in the previous call
        while some ranks were still in it; these ranks will be between steps next. (Ranks that are already in the next
        call have met the newcomers.)
        """
        before, mesh = communicator.rank(), remeshing.layout_of(self._strategies())
        is_on_trial = self.is_on_trial
        with setting(_in_call, True):
            while True:
                try:
                    mine = Report(
                        before,
                        self._finished,
                        has_met_newcomers=self.has_met_newcomers,
                        is_on_trial=is_on_trial,
                        leaving=leaving,
                    )
                    reports = self._meet(newcomers, mine)
                    self.has_met_newcomers = any(each.finished is None or each.has_met_newcomers for each in reports)
                    self._catch_up(reports, list, caller)
                    reason = self._share_out(reports[0].leaving)
                    self._take_over(before, may_lack_last=True)
                except (RankLostError, DeadlineError) as error:
                    reason = caller.cut_step.repeat_obstacle()
                    if not communicator.is_initialized() or reason is not None:
                        raise with_reason(error, reason or "") from None
                    continue
                if reason is not None:
                    raise with_reason(RankLostError("found when ranks were about to join or leave"), reason)
                remeshing.say(mesh, [], remeshing.layout_of(self._strategies()))
                return all(each.finished in (None, self._finished) for each in reports)

    def receive(self, meet: Callable[[], Topology]) -> None:
        """Gets the state, as a newcomer, from the ranks that it meets. COLLECTIVE over all ranks."""
        with setting(_in_call, True):
            while True:
                try:
                    self._renew(meet(), one_per_job.alive())
                    reports = self._exchange(Report(-1, None))
                    self._catch_up(reports, list, None)
                    reason = self._share_out(reports[0].leaving)
                except RankLostError:
                    if not communicator.is_initialized():
                        raise
                    meet = communicator.regroup
                    continue
                if reason is not None:
                    raise RankLostError(reason)
                return

    def has_joined(self, finished: int, joining: Joining) -> None:
        """Called when this newcomer has become a rank and has the state after a number of calls."""
        self._finished, self.joining = finished, joining

    def _compare(self) -> None:
        """After a loss, lets the ranks compare their weights if all of them are between the same two calls."""
        if self._compares_at is not None and self._compares_at == self._finished:
            for each in trainer_calls.followers():
                each.compare()
            self._compares_at = None

    def repeat(self, call: Callable[[Communicator], Any], variables: Callable[[], list[Any]] = list) -> Any:
        """Returns `call` of the communicator of all ranks, repeated while ranks are lost (history.recover_by)."""
        if not trainer_calls.running() and not _in_call.get():
            try:
                return call(communicator.communicator_of(None))
            except (RankLostError, DeadlineError) as error:
                raise with_reason(error, OWN_COLLECTIVE) from None
        return self.call(lambda: call(communicator.communicator_of(None)), variables)

    def _strategies(self) -> list[Any]:
        place = communicator.topology()
        return [each for each in one_per_job.alive() if each.topology is place]

    def _continue(self, error: Exception, variables: Callable[[], list[Any]], caller: Caller | None) -> bool:
        """Continues with the remaining ranks. Returns whether the call is finished because other ranks had finished
        it."""
        before, size, begun = communicator.rank(), communicator.size(), self.finished()
        is_on_trial = self.is_on_trial
        has_traced = caller is not None and caller.may_have_traced(is_python=False)
        reason = None if caller is None else caller.cut_step.repeat_obstacle()
        mesh = remeshing.layout_of(self._strategies())
        while reason is None:
            try:
                in_call = self.finished() == begun  # False: others were lost after the call was finished
                mine = Report(before, self._finished, has_traced if in_call else None, is_on_trial=is_on_trial)
                reports = self._meet(None, mine)
                old = sorted(each.rank for each in reports if each.finished is not None)
                # No rank was lost, or one left by itself: the program is wrong, and repeating the call would not help.
                # (A rank that left may still meet the others.)
                if len(old) == size or (getattr(error, "has_left", False) and communicator.any_rank_ended()):
                    break
                if old[0] != 0 and gathers_on_rank_0():
                    reason = PREDICTIONS
                    break
                self._catch_up(reports, variables, caller)
                reason = self._share_out({})
                if reason is None:
                    is_finished = self.finished() > begun
                    # If some ranks had finished this call, rank 0 had begun it and written everything before it.
                    self._take_over(before, may_lack_last=not is_finished)
                    remeshing.say(mesh, sorted({*range(size)} - {*old}), remeshing.layout_of(self._strategies()))
                    return is_finished
            except TooFewError:
                raise
            except (RankLostError, DeadlineError) as another:
                if not communicator.is_initialized():
                    reason = str(another)
        raise error if reason is None else with_reason(error, reason)

    def _may_be_of_newcomers(self, error: Exception) -> bool:
        """Whether a call may have failed because newcomers made another call or failed in it. The others then repeat it
        without them, and an error that has another cause appears again.
        """
        failed_rank = getattr(error, "failed_rank", None)
        if self.is_on_trial:
            return failed_rank is None or failed_rank in self.on_trial
        return bool(self.on_trial) and (isinstance(error, RankMismatchError) or failed_rank in self.on_trial)

    def _share_out(self, leaving: Mapping[int, str]) -> str | None:
        """Redistributes shards and slices, and lets ranks leave. Returns a message that says what is lost, if anything.

        leaving: as in Report.
        """
        is_new, strategies, members = self._finished is None, self._strategies(), communicator.members()
        renew = functools.partial(self._renew, strategies=strategies)
        why = {rank: leaving[number] for rank, number in enumerate(members) if number in leaving}
        on_trial = {members[rank] for rank in self.on_trial}
        reason = sharing_out.share_out(self._generations, strategies, renew, is_new=is_new, leaving=why)
        self.on_trial = frozenset(rank for rank, number in enumerate(communicator.members()) if number in on_trial)
        return reason

    def _take_over(self, before: int, *, may_lack_last: bool) -> None:
        """If this rank, whose number was `before`, is now rank 0, it writes from now on."""
        if communicator.rank() == 0 and before != 0:
            self.joining.become_first()
            for follower in trainer_calls.followers():
                follower.become_first(may_lack_last=may_lack_last)

    def _meet(self, admits: Sequence[int] | None, mine: Report) -> list[Report]:
        strategies = self._strategies()
        self._renew(communicator.regroup_with(admits), strategies)
        return self._exchange(mine)

    def _renew(self, topology: Topology, strategies: Sequence[BaseStrategy]) -> None:
        self._place, self._epoch = topology, communicator.epoch()
        for each in strategies:
            each.renew(topology)
        _prepare_plans()

    def _exchange(self, mine: Report) -> list[Report]:
        return communicator.all_gather_object(mine, name="keras_ddl/survival/finished")

    def _catch_up(self, reports: list[Report], variables: Callable[[], list[Any]], caller: Caller | None) -> None:
        """Finishes the call if other ranks have finished it; otherwise all must repeat it. Newcomers get the state of
        the job."""
        newcomer_ranks = {number for number, each in enumerate(reports) if each.is_on_trial or each.finished is None}
        self.on_trial = frozenset(newcomer_ranks if len(newcomer_ranks) < len(reports) else ())
        calls = [each.finished for each in reports]
        if calls.count(None) == len(calls):
            raise RankLostError("All ranks that had the state of the training are lost.")
        most = self._compares_at = max(each for each in calls if each is not None)
        if any(each not in (None, most) for each in calls):
            self._share_last_call(calls.index(most), self._finished not in (None, most), variables, caller)
        else:
            may_have_traced = [each.has_traced for each in reports]
            if caller is not None and any(may_have_traced) and None not in may_have_traced:
                caller.forget_traces()  # all are in the same call, which some may have traced
        if None in calls:
            self.joining.share_state(calls.index(most))

    def _share_last_call(
        self, root: int, is_behind: bool, variables: Callable[[], list[Any]], caller: Caller | None
    ) -> None:
        """Sends the writes and the result of rank `root` to ranks that are behind (perhaps this one)."""
        written = variables() if is_behind else self._written()
        written = sharded_slots.whole(written)
        before = [(each, tf.identity(tf.convert_to_tensor(each))) for each in written if is_behind]
        try:
            replicate(written, root)
            returned = tf.nest.map_structure(_sent, self._returned) if communicator.rank() == root else None
            returned = communicator.broadcast_object(returned, root, name="keras_ddl/survival/returned")
        except BaseException:  # the root is lost, too, and its state has arrived only in part
            for variable, value in before:
                variable.assign(value)
            raise
        if is_behind:
            if caller is not None:
                caller.cut_step.complete()  # no other rank has this rank's shards
            self._finish(variables, tf.nest.map_structure(_received, returned))


def _prepare_plans() -> None:
    """Raises: RankLostError: another rank was lost or hangs; the engine does not say which."""
    try:
        communicator.prepare_plans()
    except CollectiveError as error:
        raise RankLostError(str(error)) from None


class _Sent:
    """A tensor that is sent to another rank."""

    def __init__(self, value: np.ndarray) -> None:
        self.value = value


def _sent(leaf: Any) -> Any:
    return _Sent(leaf.numpy()) if tf.is_tensor(leaf) else leaf


def _received(leaf: Any) -> Any:
    return tf.constant(leaf.value) if isinstance(leaf, _Sent) else leaf
