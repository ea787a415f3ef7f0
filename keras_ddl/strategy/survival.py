"""What goes on when a rank is lost: the ranks that are left make the call again that has failed.

All ranks make the same calls, of steps and of collectives between them, in the same order. A step writes nothing before
its commit, every rank has all weights, and the batch of a step is kept until it has ended. So when a rank is lost, each
call was either finished by no rank, and is made again; or by some, who give the others what it has written and
returned. The traced program does not know how many ranks there are; it is cut again for those that are left.

Where rank 0 is lost, the lowest rank that is left is the new one, and its callbacks write from then on
(keras_patches/standby.py). Before the next call the ranks compare their weights.
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
from keras_ddl.strategy.interface import strategy_of
from keras_ddl.strategy.step import accumulation
from keras_ddl.strategy.step.failing_together import Caller

_AGAIN = object()
_in_call: ContextVar[bool] = ContextVar("keras_ddl_in_surviving_call", default=False)


class Survival:
    """The calls of a job that goes on. Those of its main thread: what other threads call may fail."""

    def __init__(self) -> None:
        self._finished = 0  # calls
        self._compares_at: int | None = None  # so many calls that all ranks have finished
        self._written: Callable[[], list[Any]] = list  # returns variables that the last of them may have written
        self._returned: Any = None
        Communicator.recover = self._collective

    def finished(self) -> int:
        """Returns how many calls this rank has finished, of those that all ranks make."""
        return self._finished

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
                    self._compare()
                    returned = run()
                except (RankLostError, DeadlineError) as error:
                    returned = self._go_on(error, variables, caller)
                    if returned is _AGAIN:
                        continue
                self._finished += 1
                self._written, self._returned = variables, returned
                return returned

    def _compare(self) -> None:
        """After a loss, has the ranks compare their weights where all of them are between the same two calls."""
        if self._compares_at == self._finished:
            for each in trainer_calls.followers():
                each.compare()
            self._compares_at = None

    def _collective(self, call: Callable[[Communicator], Any], variables: Callable[[], list[Any]] = list) -> Any:
        # Outside of fit, evaluate and predict a program may exchange what each rank has for itself.
        if not trainer_calls.running() or threading.current_thread() is not threading.main_thread():
            return call(communicator.communicator_of(None))
        return self.call(lambda: call(communicator.communicator_of(None)), variables)

    def _go_on(self, error: Exception, variables: Callable[[], list[Any]], caller: Caller | None) -> Any:
        old = communicator.topology()
        strategies = [each for each in one_per_job.alive() if each.topology is old]
        has_shards = any(each.job.shards_from_elements is not None for each in strategies)
        draws = caller is not None and caller.cut_step.draws_in_kernels()
        # What only the lost rank had is lost; and one that has left by itself is missed by a program that is wrong.
        if has_shards or draws or accumulation.is_in_parts() or getattr(error, "has_left", False):
            raise error
        while True:
            try:
                topology = communicator.regroup()
                first = communicator.all_gather_object(old.rank, name="keras_ddl/survival/ranks")[0]
                if topology.size == old.size or (first != 0 and _gathers_on_rank_0()):
                    break
                for strategy in strategies:
                    strategy.renew(topology)
                returned = self._catch_up(variables, caller)
                if topology.rank == 0 and old.rank != 0:
                    # Where some have finished this call, rank 0 had begun it, and had written all that came before.
                    for follower in trainer_calls.followers():
                        follower.become_first(may_lack_last=returned is _AGAIN)
                return returned
            except RankLostError:
                if not communicator.is_initialized():
                    raise
        raise error

    def _catch_up(self, variables: Callable[[], list[Any]], caller: Caller | None) -> Any:
        """Returns what the call has returned on ranks that have finished it; _AGAIN: this rank is to make it."""
        mine = self._finished, caller is not None and caller.may_have_traced(is_python=False)
        gathered = communicator.all_gather_object(mine, name="keras_ddl/survival/finished")
        most = self._compares_at = max(finished for finished, _ in gathered)
        if all(finished == most for finished, _ in gathered):  # all are in the same call, which some may have traced
            if caller is not None and any(traced for _, traced in gathered):
                caller.forget_traces()
            return _AGAIN
        root = next(rank for rank, (finished, _) in enumerate(gathered) if finished == most)
        is_behind = self._finished < most
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
