"""What goes on when a rank is lost: the ranks that are left make the call again that has failed.

All ranks make the same calls, of steps and of collectives between them, in the same order. A step writes nothing before
its commit, every rank has all weights, and the batch of a step is kept until it has ended. So when a rank is lost, each
call was either finished by no rank, and is made again; or by some, who give the others what it has written and
returned. The traced program does not know how many ranks there are; it is cut again for those that are left.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import numpy as np

from keras_ddl import communicator, ops
from keras_ddl.communicator import Communicator, membership
from keras_ddl.compat.context import setting
from keras_ddl.compat.tensorflow import tf
from keras_ddl.errors import DeadlineError, RankLostError
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
        Communicator.recover = self._collective

    def call(
        self, run: Callable[[], Any], variables: Callable[[], list[Any]] = list, caller: Caller | None = None
    ) -> Any:
        """Returns `run()`, made again with the ranks that are left as often as some are lost. COLLECTIVE.

        Args:
            variables: returns those that it may write. caller: of the step that it runs, if it does.
        """
        if _in_call.get():
            return run()
        with setting(_in_call, True):
            while True:
                try:
                    returned = run()
                except (RankLostError, DeadlineError) as error:
                    if not self._go_on(error, variables, caller):
                        continue
                else:
                    self._finish(variables, returned)
                return self._returned

    def _finish(self, variables: Callable[[], list[Any]], returned: Any) -> None:
        self._finished += 1
        self._written, self._returned = variables, returned

    def _collective(self, call: Callable[[Communicator], Any]) -> Any:
        # Outside of fit, evaluate and predict a program may exchange what each rank has for itself.
        if not trainer_calls.running() or threading.current_thread() is not threading.main_thread():
            return call(communicator.communicator_of(None))
        return self.call(lambda: call(communicator.communicator_of(None)))

    def _go_on(self, error: Exception, variables: Callable[[], list[Any]], caller: Caller | None) -> bool:
        """Goes on with the ranks that are left. Returns whether others had finished the call, and this rank has now."""
        old, begun = communicator.topology(), self._finished
        strategies = [each for each in one_per_job.alive() if each.topology is old]
        draws = caller is not None and caller.cut_step.draws_in_kernels()
        # What only the lost rank had is lost; and one that has left by itself is missed by a program that is wrong.
        if draws or getattr(error, "has_left", False):
            raise error
        while True:
            try:
                topology = communicator.regroup()
                ranks = communicator.all_gather_object(old.rank, name="keras_ddl/survival/ranks")
                if topology.size == old.size or ranks[0] != 0:  # rank 0 has written for all, and others cannot go on
                    break
                for each in strategies:
                    each.renew(topology)
                self._catch_up(variables, caller)
                reasons = [lost_chunks.share_out(each.job) for each in strategies]
                if any(reasons):
                    break
                return self._finished > begun
            except RankLostError:
                if not communicator.is_initialized():
                    raise
        raise error

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


def not_again() -> AbstractContextManager[None]:
    """Returns the context of a call of which a lost rank has a part that no other has: it is not made again."""
    return setting(_in_call, True)


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
