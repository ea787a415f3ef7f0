"""Lets the training ranks admit newcomers, and lets ranks leave, between two steps (joining.py)."""

from __future__ import annotations

from typing import Any

from keras_ddl import communicator
from keras_ddl.communicator.newcomers import history
from keras_ddl.data import order
from keras_ddl.errors import DriftError, RankMismatchError
from keras_ddl.resilience.joining_base import give_up
from keras_ddl.resilience.joining_state import STATE, JoiningInFit, State, share_variables
from keras_ddl.resilience.survival import Survival
from keras_ddl.state.callback_state import plain_attributes
from keras_ddl.strategy import agreement
from keras_ddl.strategy.keras_patches.callbacks import CallbackList
from keras_ddl.strategy.saving.progress import capture
from keras_ddl.strategy.shards import sharded_slots
from keras_ddl.strategy.step import failing_together

TRIAL_STEPS = 20  # before each of them, newcomers prove that their state equals the others'


class Admission(JoiningInFit):
    """The side of the ranks that train."""

    def __init__(self, record: history.Record, survival: Survival) -> None:
        super().__init__(survival)
        self._record, self._board = record, record.board
        self._admitted_at = 0
        # Used on rank 0: newcomers that want to join, and those that rank 0 has called. The others must not wait for a
        # newcomer that was not called, because it waits for rank 0.
        self._wanting: set[str] = set()
        self._called: set[str] = set()
        self._leaving: dict[int, str] = {}  # on rank 0: {rank to leave: reason}
        self._steps = 0  # since newcomers joined or fit began
        self._begins_epoch = False

    @classmethod
    def for_newcomer(cls, record: history.Record, newcomer: JoiningInFit, admitted_at: int) -> Admission:
        """Returns the Admission of a newcomer that has become a rank."""
        admission = cls(record, newcomer._survival)
        admission._admitted_at = admitted_at
        admission._callbacks, admission._changes = newcomer._callbacks, newcomer._changes
        admission._compares_batch = admission._is_new = admission.has_newcomers = True
        return admission

    def look(self) -> None:
        """Lets rank 0 answer newcomers. Call it now and then."""
        board = self._board
        if not board.has_question or communicator.rank() != 0:
            return
        board.has_question = False
        self._record.answer_questions()
        for name, call in self._waiting().items():
            if call < self._record.calls or (call == self._record.calls and not self._record.in_call):
                board.answer(name, self._record.pickled())  # the call that it wanted to join has ended
            elif call == self._record.calls and self._callbacks is not None and name not in self._called:
                self._wanting.add(name)
        members = communicator.members()
        leaving = {int(name): why for name, why in board.questions("leave").items()}
        self._leaving = {number: why for number, why in leaving.items() if number in members}

    def between_steps(self, caller: failing_together.Caller) -> None:
        """Admits newcomers and lets ranks leave before a step of fit, if any are due. COLLECTIVE in that case."""
        self._record.pause()
        callbacks = self._callbacks
        if callbacks is None:
            return
        self._admit(callbacks, caller)
        self.prove_before_step(callbacks)

    def prove_before_step(self, callbacks: CallbackList) -> None:
        """Calls `prove` before the first steps with newcomers and each epoch's first step. COLLECTIVE in these cases.

        At these points, no step has used callbacks' changes yet.
        """
        if self._steps < TRIAL_STEPS or self._begins_epoch:
            self.prove(callbacks)
        self._begins_epoch = False
        self._steps += 1

    def prove(self, callbacks: CallbackList) -> None:
        """Makes newcomers leave the job if their state differs from the others'. COLLECTIVE if there are newcomers.

        Cost: a checksum of all weights and slots and one small exchange; nothing in jobs without newcomers.
        """
        if not self.has_newcomers:
            return
        mine = callbacks.checksums()
        right = communicator.all_gather_object(mine, name="keras_ddl/joining/trial")[0]
        if self._survival.is_on_trial and mine != right:
            name = next((name for name, value in mine.items() if right.get(name) != value), "fewer variables")
            give_up(
                DriftError(
                    "On a rank that joins a running job, callbacks must change state in the same way as on the "
                    f"other ranks. Received: {name}, changed differently on this rank. Let callbacks keep their "
                    "state in attributes: numbers, strings, arrays, random generators, or lists and dicts of these."
                )
            )

    def _admit(self, callbacks: CallbackList, caller: failing_together.Caller) -> None:
        """Lets waiting newcomers join and leaving ranks leave, before a step on which all ranks agree."""
        board, survival = self._board, self._survival
        finished = survival.finished()
        self.look()
        if (self._wanting or self._leaving) and board.admit_at == self._admitted_at:
            room = survival.room_for(len(self._wanting), len(self._leaving))
            self._called = set(sorted(self._wanting, key=int)[:room])  # the others wait until there is room
            self._wanting -= self._called
            if self._called or self._leaving:
                for name in self._called:
                    board.answer(name, self._record.pickled())
                board.admit_at = finished + 1
        if board.admit_at == self._admitted_at or finished < board.admit_at:
            return
        self._admitted_at = board.admit_at
        called, self._called = self._called, set()
        leaving, self._leaving = self._leaving, {}
        survival.has_met_newcomers = False
        while not survival.admit([int(name) for name in called], leaving, caller):
            pass
        if survival.has_met_newcomers:
            self._steps, self.has_newcomers = 0, True
            self._forget_state(callbacks)
            self.agree_on_trace(callbacks, caller)
        for name in called:
            board.forget("join", name)  # in case the newcomer was lost
        board.has_question = True  # others may still wait, and rank 0 may have changed

    def begin_fit(self, callbacks: CallbackList) -> None:
        super().begin_fit(callbacks)
        self._steps = 0
        self._board.has_question = True  # newcomers may have asked earlier

    def begin_epoch(self) -> bool:
        """Like `Newcomer.begin_epoch`."""
        self._begins_epoch = True
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
                    "A rank that joins a running job must read the same batches as the other ranks. Received: a batch "
                    "that differs from theirs, at the same position in the data. Seed everything that draws random "
                    "numbers: keras.utils.set_random_seed(n)."
                )
            )

    def become_first(self) -> None:
        """Called when this rank becomes rank 0.

        The lost rank 0 may have taken newcomers' questions with it, and may have called newcomers that no other rank
        knows.
        """
        self._board.has_question = True

    def end_fit(self) -> None:
        """Ends admission, because training has ended."""
        self._callbacks, self._leaving = None, {}
        self._wanting.clear()
        self._called.clear()
        self._board.has_question = True

    def share_state(self, giver: int) -> None:
        """Lets rank `giver` send newcomers the state. COLLECTIVE over all ranks, newcomers included."""
        callbacks = self._callbacks
        assert callbacks is not None
        mine = self._state(callbacks) if communicator.rank() == giver else None
        communicator.broadcast_object(mine, giver, name=STATE)
        share_variables(callbacks.model, giver)

    def _waiting(self) -> dict[str, int]:
        return {name: int(call) for name, call in self._board.questions("join").items()}

    def _state(self, callbacks: CallbackList) -> State:
        epochs, batches, logs = callbacks.position
        record, arrays = capture(callbacks.model, [], epochs, batches, logs)
        return State(
            finished=self._survival.finished(),
            admitted_at=self._admitted_at,
            variables=agreement.descriptions(callbacks.model),
            optimizers=agreement.built_optimizers(callbacks.model),
            position=(epochs, batches),
            record=record,
            arrays=arrays,
            callbacks=self._changes.since(callbacks.callbacks),
            agreed=[plain_attributes(each) for each in callbacks.agreed_state()],
            passes=order.passes(),
            slots=sharded_slots.numbers_in(agreement.all_variables(callbacks.model)),
        )
