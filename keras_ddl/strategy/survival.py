"""What goes on when a rank is lost: the ranks that are left make the call again that has failed.

All ranks make the same calls, of steps and of collectives between them, in the same order. A step writes nothing before
its commit, every rank has all weights, and the batch of a step is kept until it has ended. So when a rank is lost, each
call was either finished by no rank, and is made again; or by some, who give the others what it has written and
returned. The traced program does not know how many ranks there are; it is cut again for those that are left.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import numpy as np

from keras_ddl import communicator, ops
from keras_ddl.communicator import Communicator, membership
from keras_ddl.compat.context import setting
from keras_ddl.compat.tensorflow import tf
from keras_ddl.errors import ConfigError, DeadlineError, RankLostError
from keras_ddl.strategy import one_per_job, trainer_calls
from keras_ddl.strategy.shards import lost_chunks, sharded_slots
from keras_ddl.strategy.step.failing_together import Caller

_in_call: ContextVar[bool] = ContextVar("keras_ddl_in_surviving_call", default=False)


class Survival:
    """The calls of a job that goes on. Those of its main thread: what other threads call may fail."""

    def __init__(self) -> None:
        self._finished = 0  # calls
        self._written: Callable[[], list[Any]] = list  # returns variables that the last of them may have written
        self._returned: Any = None
        self._place, self._epoch = communicator.topology(), communicator.epoch()
        Communicator.recover = self._collective

    def call(
        self, run: Callable[[], Any], variables: Callable[[], list[Any]] = list, caller: Caller | None = None
    ) -> Any:
        """Returns `run()`, made again with the ranks that are left as often as some are lost. COLLECTIVE.

        Args:
            variables: returns those that it may write. caller: of the step that it runs, if it does.
        """
        if _in_call.get() or threading.current_thread() is not threading.main_thread():
            return run()
        with setting(_in_call, True):
            self._follow()
            while True:
                try:
                    returned = run()
                except (RankLostError, DeadlineError) as error:
                    if not self._go_on(error, variables, caller):
                        continue
                else:
                    self._finish(variables, returned)
                return self._returned

    def _follow(self) -> None:
        """Has the Strategies go on with the ranks that are left where the program itself has called `regroup`.

        What some ranks have finished and others have not is then for the program to make up for.
        """
        place, epoch = communicator.topology(), communicator.epoch()
        if place is self._place:
            return
        if epoch != self._epoch:
            for each in one_per_job.alive():
                if each.topology is self._place:
                    if each.job.shards_from_elements is not None:
                        raise ConfigError(
                            "Strategy(shard_optimizer=True) goes on by itself when a rank is lost, not after "
                            f"keras_ddl.regroup(). Received: another step after it (rank {place.rank}). Do not catch "
                            "RankLostError, or make the Strategy without shard_optimizer."
                        )
                    each.renew(place)
            self._finished = 0
        self._place, self._epoch = place, epoch

    def _finish(self, variables: Callable[[], list[Any]], returned: Any) -> None:
        self._finished += 1
        self._written, self._returned = variables, returned

    def _collective(self, call: Callable[[Communicator], Any]) -> Any:
        if not trainer_calls.running() and not _in_call.get():
            try:
                return call(communicator.communicator_of(None))
            except (RankLostError, DeadlineError) as error:
                raise _with_reason(error, _OWN_COLLECTIVE) from None
        return self.call(lambda: call(communicator.communicator_of(None)))

    def _go_on(self, error: Exception, variables: Callable[[], list[Any]], caller: Caller | None) -> bool:
        """Goes on with the ranks that are left. Returns whether others had finished the call, and this rank has now."""
        old, begun = communicator.topology(), self._finished
        strategies = [each for each in one_per_job.alive() if each.topology is old]
        if getattr(error, "has_left", False):  # by itself: then the program is wrong, and would be again
            raise error
        reason = None if caller is None else caller.cut_step.why_not_again()
        while reason is None:
            try:
                topology = self._place = communicator.regroup()
                self._epoch = communicator.epoch()
                ranks = communicator.all_gather_object(old.rank, name="keras_ddl/survival/ranks")
                if topology.size == old.size:  # nobody was lost
                    raise error
                if ranks[0] != 0:
                    reason = _RANK_0
                    break
                for each in strategies:
                    each.renew(topology)
                self._catch_up(variables, caller)
                reason = next(filter(None, [lost_chunks.share_out(each.job) for each in strategies]), None)
                if reason is None:
                    return self._finished > begun
            except RankLostError as another:
                if another is error:
                    raise
                if not communicator.is_initialized():
                    reason = str(another)
        raise _with_reason(error, reason)

    def _catch_up(self, variables: Callable[[], list[Any]], caller: Caller | None) -> None:
        """Finishes the call if other ranks have. Else all are to make it again."""
        mine = self._finished, caller is not None and caller.may_have_traced(is_python=False)
        gathered = communicator.all_gather_object(mine, name="keras_ddl/survival/finished")
        most = max(finished for finished, _ in gathered)
        if all(finished == most for finished, _ in gathered):  # all are in the same call, which some may have traced
            if caller is not None and any(traced for _, traced in gathered):
                caller.forget_traces()
            return
        root = next(rank for rank, (finished, _) in enumerate(gathered) if finished == most)
        is_behind = self._finished < most
        written = variables() if is_behind else self._written()
        written = [each for each in written if sharded_slots.sharded_variable(each) is None]
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
        if is_behind:
            if caller is not None:
                caller.cut_step.complete()  # of variables in shards no other rank has this one's
            self._finish(variables, tf.nest.map_structure(_received, returned))


_RANK_0 = "Rank 0 writes checkpoints, logs and the progress bar for all. Received: it was lost."
_OWN_COLLECTIVE = (
    "fit, evaluate, predict and steps of strategy.function go on by themselves. Received: a collective outside of "
    "these, for which each rank may have had something of its own. Catch RankLostError on all ranks and call "
    "keras_ddl.regroup()."
)


def _with_reason(error: Exception, reason: str) -> Exception:
    """Returns `error`, which says who was lost, with why the others do not go on."""
    if _DO_NOT not in str(error):
        lost = f"rank {', '.join(map(str, ranks))}" if (ranks := getattr(error, "ranks", ())) else "the lost rank"
        rest = "--restarts starts the job again from its last checkpoint."
        error.args = (f"{_DO_NOT} without {lost}. {reason} {rest} ({error})",)
    return error


_DO_NOT = "The other ranks do not go on"


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
