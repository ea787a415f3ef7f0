"""How a newcomer becomes a rank while the others train: between two steps it gets all that they know.

A spare (`keras-ddl run --spares`) runs the script from its first line, with what the others have recorded
(communicator/history.py), until `fit` begins that they are in. There it asks to join, and rank 0 says for all ranks
after which call they meet it. Then rank 0 gives it variables, metrics, the position in the data, and what callbacks
have noted since fit began, as a checkpoint would; and it goes on as a fit that is resumed there.

Ranks see in shared memory that newcomers are to be admitted. Rank 0 says so before a step, which none can end without
it; so all have seen it before the next one.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import numpy as np

from keras_ddl import communicator
from keras_ddl.communicator import history
from keras_ddl.compat import epoch_iterators
from keras_ddl.data import order
from keras_ddl.errors import CollectiveError, RankMismatchError
from keras_ddl.strategy import agreement, fits
from keras_ddl.strategy.interface import strategy_of
from keras_ddl.strategy.keras_patches.standby import Standby
from keras_ddl.strategy.noted import Noted, plain_attributes, take_over, update
from keras_ddl.strategy.progress import Restoration, build_for_data, capture
from keras_ddl.strategy.step import failing_together, garbage
from keras_ddl.strategy.step.cut_step import broadcast_numbers

if TYPE_CHECKING:
    from keras_ddl.topology import Topology

_STATE = "keras_ddl/joining/state"
_FIT = "Model.fit"  # as replayed_calls.py records it


class CallbacksOfFit(Protocol):
    """The list of callbacks of a fit (keras_patches/callbacks.py)."""

    model: Any
    callbacks: list[Any]
    position: tuple[int, int, Any]  # epochs done, batches done in the epoch, logs of the last of them

    def agreed_state(self) -> list[Any]: ...


class Survives(Protocol):
    """A `survival.Survival`, which imports this module."""

    def finished(self) -> int: ...
    def call(self, run: Callable[[], Any], variables: Callable[[], list[Any]]) -> Any: ...
    def has_joined(self, finished: int, admission: Admission) -> None: ...
    def admit(self, newcomers: Sequence[int], caller: failing_together.Caller) -> bool: ...
    def receive(self, meet: Callable[[], Topology]) -> None: ...


class CallHasEnded(Exception):
    """The others have ended the call of the trainer in which a newcomer wanted to join them."""


@dataclass
class _State:
    """What a newcomer gets. `callbacks`, `agreed`: attributes of callbacks and of what their list has agreed on."""

    finished: int
    admitted_at: int
    variables: list[str]
    optimizers: dict[str, list[int | None]]
    position: tuple[int, int]
    record: dict[str, Any]
    arrays: dict[str, Any]
    callbacks: dict[str, dict[str, Any]]
    agreed: list[dict[str, Any]]
    passes: np.ndarray


class _Joining:
    """What members and newcomers have in common. `_callbacks`: of the outermost fit, from its on_train_begin on."""

    def __init__(self, survival: Survives) -> None:
        self._survival = survival
        self._callbacks: CallbacksOfFit | None = None
        self._compares_batch = False
        self._at_begin = Noted([])

    def begin_fit(self, callbacks: CallbacksOfFit) -> None:
        """Training begins: all callbacks have had their on_train_begin."""
        if fits.is_outermost(callbacks.model):
            self._callbacks = callbacks
            self._at_begin = Noted(callbacks.callbacks)

    def _begin_anew(self, callbacks: CallbacksOfFit) -> None:
        """Forgets what a newcomer cannot have. All ranks do it between the same two calls, whether or not the newcomer
        is lost meanwhile.
        """
        # Whatever is traced from now on is traced by all: variables get rank 0's values when a step first uses them.
        failing_together.forget_all_traces(but=callbacks.model.train_function)  # see _agree_on_trace
        order.forget_notes()
        # The data of validation is read from its beginning, by all.
        epoch_iterators.forget_validation(callbacks.model)
        self._compares_batch = True

    def _agree_on_trace(self, callbacks: CallbacksOfFit, caller: failing_together.Caller) -> None:
        """Keeps the trace of the training step if all ranks have the same. COLLECTIVE over all, newcomers included."""
        variables, traced, digest = agreement.all_variables(callbacks.model), caller.common_trace(), None
        if traced is not None:
            digest = traced.kind, caller.cut_step.trace_digest(traced.concrete, [each.value for each in variables])
        digests = communicator.all_gather_object(digest, name="keras_ddl/joining/trace")
        if traced is None or any(each != digest for each in digests):
            caller.forget_traces()
            return
        equal = {each.value.ref() for each in variables}
        others = [each for each in caller.cut_step.keep_only(traced.concrete) if each.ref() not in equal]
        self._survival.call(lambda: broadcast_numbers(others, root=0), lambda: others)


class Admission(_Joining):
    """The side of the ranks that train."""

    def __init__(self, record: history.Record, survival: Survives) -> None:
        super().__init__(survival)
        self._record, self._board = record, record.board
        self._admitted_at = 0
        self._is_new = False  # this rank has joined, and has made no step yet
        self._called: set[str] = set()  # newcomers whom rank 0 has asked to come

    @classmethod
    def of_newcomer(cls, record: history.Record, survival: Survives, newcomer: Newcomer, admitted_at: int) -> Admission:
        """Returns that of a newcomer that has become a rank."""
        admission = cls(record, survival)
        admission._admitted_at = admitted_at
        admission._callbacks, admission._at_begin = newcomer._callbacks, newcomer._at_begin
        admission._compares_batch = admission._is_new = True
        return admission

    def look(self) -> None:
        """Rank 0 answers newcomers. To be called now and then."""
        board = self._board
        if not board.has_question or communicator.rank() != 0:
            return
        board.has_question = False
        self._record.answer_questions()
        for name, call in self._waiting().items():
            if call < self._record.calls or (call == self._record.calls and not self._record.in_call):
                board.answer(name, self._record.pickled())  # what it was to join has ended
                board.forget("join", name)
            elif call == self._record.calls and self._callbacks is not None:
                self._called.add(name)

    def between_steps(self, caller: failing_together.Caller) -> None:
        """Admits newcomers, before a step of fit, if it is time. COLLECTIVE then."""
        self._record.pause()
        board, survival = self._board, self._survival
        finished = survival.finished()
        if self._callbacks is None:
            return
        self.look()
        if self._called and board.admit_at == self._admitted_at:
            for name in self._called:
                board.answer(name, self._record.pickled())
            board.admit_at = finished + 1
        if board.admit_at == self._admitted_at or finished < board.admit_at:
            return
        self._admitted_at = board.admit_at
        called, self._called = self._called, set()
        while not survival.admit([int(name) for name in called], caller):
            pass
        self._begin_anew(self._callbacks)
        self._agree_on_trace(self._callbacks, caller)
        for name in called:
            board.forget("join", name)
        board.has_question = True  # of those that still wait; rank 0 may be another one now

    def begin_fit(self, callbacks: CallbacksOfFit) -> None:
        super().begin_fit(callbacks)
        strategy = strategy_of(callbacks.model)
        if strategy is not None and strategy.job.shards_from_elements is not None:
            self._record.close("a model whose optimizer is in shards, which no newcomer has")
        self._board.has_question = True  # newcomers may have come before

    def begin_epoch(self) -> bool:
        """As `Newcomer.begin_epoch`."""
        return False

    def check_batch(self, batch: Any) -> None:
        """Checks, before the first step with newcomers, that they read what the others read. COLLECTIVE then."""
        if not self._compares_batch:
            return
        is_new, self._is_new, self._compares_batch = self._is_new, False, False
        words = order.digest(batch).numpy().tolist()
        gathered = communicator.all_gather_object(words, name="keras_ddl/joining/batch")
        if is_new and words != gathered[0]:
            give_up(
                RankMismatchError(
                    "A newcomer must read the same batches as the others. Received: another batch than theirs, at the "
                    "place of the data where they are. Set the seeds of all that the script draws."
                )
            )

    def end_fit(self) -> None:
        """Training has ended: nobody can join any more."""
        self._callbacks = None
        self._called.clear()
        self._board.has_question = True

    def share_state(self, giver: int) -> None:
        """Rank `giver` gives newcomers the state. COLLECTIVE over them, too."""
        callbacks = self._callbacks
        assert callbacks is not None
        mine = self._state(callbacks) if communicator.rank() == giver else None
        communicator.broadcast_object(mine, giver, name=_STATE)
        agreement.broadcast_variables(agreement.all_variables(callbacks.model), giver)

    def _waiting(self) -> dict[str, int]:
        return {name: int(call) for name, call in self._board.questions("join").items()}

    def _state(self, callbacks: CallbacksOfFit) -> _State:
        epochs, batches, logs = callbacks.position
        record, arrays = capture(callbacks.model, [], epochs, batches, logs)
        return _State(
            finished=self._survival.finished(),
            admitted_at=self._admitted_at,
            variables=agreement.descriptions(callbacks.model),
            optimizers=agreement.built_optimizers(callbacks.model),
            position=(epochs, batches),
            record=record,
            arrays=arrays,
            callbacks=self._at_begin.since(callbacks.callbacks),
            agreed=[plain_attributes(each) for each in callbacks.agreed_state()],
            passes=order.passes(),
        )


class Newcomer(_Joining):
    """The side of a newcomer, until it has made its first step."""

    def __init__(self, replay: history.Replay, survival: Survives) -> None:
        super().__init__(survival)
        global _newcomer
        self._replay, _newcomer = replay, self
        self._state_of_all: _State | None = None
        self._restoration: Restoration | None = None
        self.is_on_its_way = False  # to its first step, as one of the ranks

    def look(self) -> None:
        """A newcomer answers nobody."""

    def check_batch(self, batch: Any) -> None:
        """A newcomer makes no step."""

    def end_fit(self) -> None:
        """As `Admission.end_fit`: of a fit without steps."""

    def begin_fit(self, callbacks: CallbacksOfFit) -> None:
        """Becomes a rank, at the end of on_train_begin of the fit that the others are in. COLLECTIVE with them.

        Raises: CallHasEnded: they have ended it.
        """
        super().begin_fit(callbacks)
        if self._callbacks is not callbacks:
            return  # a fit inside another call
        replay = self._replay
        build_for_data(callbacks.model)
        _trace_ahead(callbacks.model)
        while True:
            if replay.ask_to_join(_FIT):
                raise CallHasEnded
            topology = communicator.join_others(lambda: replay.board.has_answer(replay.name))
            if topology is not None:
                break
        history.begin(None)
        met = iter([topology])
        try:
            self._survival.receive(lambda: next(met))
        except Exception as error:
            give_up(error)
        self.is_on_its_way = True
        history.begin(replay.record())

    def share_state(self, giver: int) -> None:
        """Takes the state from rank `giver`. COLLECTIVE over all ranks."""
        callbacks = self._callbacks
        assert callbacks is not None
        self._take(communicator.broadcast_object(None, giver, name=_STATE), callbacks)
        agreement.broadcast_variables(agreement.all_variables(callbacks.model), giver)
        self._begin_anew(callbacks)

    def begin_epoch(self) -> bool:
        """An epoch begins. Returns whether it is that in which the others already are."""
        if self._restoration is None:
            return False
        assert self._callbacks is not None
        self._restoration.at_epoch_begin([])
        self._restoration = None
        return True

    def between_steps(self, caller: failing_together.Caller) -> None:
        """The first step of this newcomer: its callbacks know now what the others' have noted."""
        state, callbacks = self._state_of_all, self._callbacks
        assert state is not None and callbacks is not None
        for each in callbacks.callbacks:
            if isinstance(each, Standby):
                each.begin_late()
        take_over(callbacks.callbacks, state.callbacks)
        for each, attributes in zip(callbacks.agreed_state(), state.agreed):
            update(each, attributes)
        order.set_passes(state.passes)
        record = history.of_job()
        assert isinstance(record, history.Record)
        admission = Admission.of_newcomer(record, self._survival, self, state.admitted_at)
        self.is_on_its_way = False
        self._survival.has_joined(state.finished, admission)
        admission._agree_on_trace(callbacks, caller)

    def _take(self, state: _State, callbacks: CallbacksOfFit) -> None:
        model = callbacks.model
        agreement.build_optimizers(model, state.optimizers)
        mine = agreement.descriptions(model)
        if mine != state.variables:
            pairs = zip([*mine, *["nothing"] * len(state.variables)], [*state.variables, *["nothing"] * len(mine)])
            first = next(pair for pair in pairs if pair[0] != pair[1])
            raise CollectiveError(
                "A newcomer must make the same model as the others, built before its first step. Received: "
                f"{first[0]}, where they have {first[1]}. Give the model an Input, or call build."
            )
        self._state_of_all = state
        self._restoration = Restoration(model, state.record, state.arrays)
        self._restoration.at_train_begin()
        fits.begin_at(model, state.position[0])
        # Passes of its own, so that nothing that it reads on its way is compared with what the others read.
        order.set_passes(np.full_like(state.passes, order.PASS_OF_NEWCOMERS))


def _trace_ahead(model: Any) -> None:
    """Traces the training step, so that the others, who have, need not wait for it."""
    strategy, reading, caller = strategy_of(model), fits.reading_of(model), model.train_function
    if strategy is None or reading is None or not isinstance(caller, failing_together.Caller):
        return
    if strategy.job.shards_from_elements is not None:
        return
    try:
        with garbage.paused():
            caller.trace_ahead(reading.iterator.batch_rows)
            if (traced := caller.common_trace()) is not None:
                caller.cut_step.trace_digest(traced.concrete, [])  # which is kept
        gc.collect()  # else Python does so when the others wait
    except Exception:  # of the program's code, which may lack the state of the others: all trace it again together
        caller.forget_traces()


_newcomer: Newcomer | None = None  # this process


def is_on_its_way() -> bool:
    """Whether this process is a newcomer that the others have admitted, and that has made no step yet."""
    return _newcomer is not None and _newcomer.is_on_its_way


def give_up(error: Exception) -> NoReturn:
    """Ends a newcomer that the others have admitted, and that cannot go on: they go on without it."""
    print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)  # what ends in another way ends the job
    raise error
