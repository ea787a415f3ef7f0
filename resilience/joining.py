"""Makes a newcomer a rank while the other ranks train. It gets their state between two steps.

A spare (`keras-ddl run --spares`) runs the script from its first line, with results that the other ranks have recorded
(communicator/newcomers/history.py), until it reaches the `fit` that they are running. There it asks to join, and rank 0
decides for all ranks after which call they meet it. Then rank 0 sends variables, metrics, the position in the data and
the state of callbacks since fit began, which a checkpoint would also contain, and the spare continues like a resumed
fit. On a mesh rank 0 admits only as many newcomers as make the mesh larger; the others wait.

Ranks see on their boards (communicator/newcomers/board.py) that newcomers are to be admitted. Rank 0 writes this before
a step that no rank can end without rank 0, so all ranks have seen it before the next step. At the same moment, ranks
that are to leave the job hand over any state that only they hold, and leave.
"""

from __future__ import annotations

import gc
from typing import Any

import numpy as np

from keras_ddl import communicator
from keras_ddl.communicator.newcomers import history
from keras_ddl.compat.tensorflow import tf
from keras_ddl.data import order
from keras_ddl.errors import CollectiveError
from keras_ddl.resilience.admission import Admission
from keras_ddl.resilience.joining_base import give_up
from keras_ddl.resilience.joining_state import (
    STATE,
    JoiningInFit,
    State,
    number_slots,
    share_variables,
)
from keras_ddl.resilience.survival import Survival
from keras_ddl.state import callback_state
from keras_ddl.strategy import agreement
from keras_ddl.strategy.base import strategy_of
from keras_ddl.strategy.calls import fits
from keras_ddl.strategy.keras_patches.callbacks import CallbackList
from keras_ddl.strategy.saving.progress import Restoration, build_for_data
from keras_ddl.strategy.shards import sharded_slots
from keras_ddl.strategy.step import failing_together, garbage

_FIT = "Model.fit"  # as replayed_calls.py records it


class CallHasEnded(Exception):
    """The other ranks have ended the call of fit in which a newcomer wanted to join them."""


class Newcomer(JoiningInFit):
    """The newcomer's side, until it has made its first step."""

    def __init__(self, replay: history.Replay, survival: Survival) -> None:
        super().__init__(survival)
        self._replay = replay
        self._state_of_all: State | None = None
        self._restoration: Restoration | None = None
        self._values: list[tuple[Any, Any]] = []  # (variable, the value received for it)

    def begin_fit(self, callbacks: CallbackList) -> None:
        """Becomes a rank at the end of on_train_begin of the fit that the other ranks are in. COLLECTIVE with them.

        Raises: CallHasEnded: the others have ended that fit.
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
            try:
                topology = communicator.join_others(replay.board.has_answer)
            except Exception as error:  # the launcher may already count it as a rank
                give_up(error)
            if topology is not None:
                break
        replay.board.forget("join")
        history.begin(None)
        met = iter([topology])
        try:
            self._survival.receive(lambda: next(met))
        except Exception as error:
            give_up(error)
        self.is_on_its_way = True
        self._values = _values_of(callbacks.model)
        history.begin(replay.record())

    def share_state(self, giver: int) -> None:
        """Takes the state from rank `giver`. COLLECTIVE over all ranks."""
        callbacks = self._callbacks
        assert callbacks is not None
        self._take(communicator.broadcast_object(None, giver, name=STATE), callbacks)
        share_variables(callbacks.model, giver)
        self._forget_state(callbacks)

    def begin_epoch(self) -> bool:
        """Called when an epoch begins. Returns whether it is the epoch that the others are in."""
        if self._restoration is None:
            return False
        assert self._callbacks is not None
        self._restoration.at_epoch_begin([])
        self._restoration = None
        return True

    def between_steps(self, caller: failing_together.Caller) -> None:
        """Called before this newcomer's first step: its callbacks get the state of the others' callbacks."""
        state, callbacks = self._state_of_all, self._callbacks
        assert state is not None and callbacks is not None
        for each in callbacks.stand_ins:
            each.begin_late()
        callback_state.set_states(callback_state.named(callbacks.callbacks), state.callbacks)
        # This newcomer's callbacks may have changed these variables, because they lacked the others' state.
        for variable, value in self._values:
            variable.value.assign(value)
        self._values = []
        for each, attributes in zip(callbacks.agreed_state(), state.agreed):
            callback_state.update(each, attributes)
        order.set_passes(state.passes)
        record = history.current()
        assert isinstance(record, history.Record)
        admission = Admission.for_newcomer(record, self, state.admitted_at)
        self.is_on_its_way = False
        self._survival.has_joined(state.finished, admission)
        admission.agree_on_trace(callbacks, caller)
        admission.prove_before_step(callbacks)

    def _take(self, state: State, callbacks: CallbackList) -> None:
        model = callbacks.model
        agreement.build_optimizers(model, state.optimizers)
        mine = agreement.descriptions(model)
        if mine != state.variables:
            pairs = zip([*mine, *["nothing"] * len(state.variables)], [*state.variables, *["nothing"] * len(mine)])
            first = next(pair for pair in pairs if pair[0] != pair[1])
            raise CollectiveError(
                "A rank that joins a running job must make the same model as the other ranks, and build it before the "
                f"first step. Received: {first[0]}, where the other ranks have {first[1]}. Give the model an Input, or "
                "call model.build(input_shape)."
            )
        number_slots(model, state.slots)
        self._state_of_all = state
        self._restoration = Restoration(model, state.record, state.arrays)
        self._restoration.at_train_begin()
        fits.begin_at(model, state.position[0])
        # With separate passes, so that its reads until then are not compared with the others' reads.
        order.set_passes(np.full_like(state.passes, order.PASS_OF_NEWCOMERS))


def _values_of(model: Any) -> list[tuple[Any, Any]]:
    """Returns the variables of a model that are not in shards, and copies of their values."""
    variables = [each for each in agreement.all_variables(model) if sharded_slots.slot_of(each) is None]
    return [(each, tf.identity(each.value)) for each in variables]


def _trace_ahead(model: Any) -> None:
    """Traces the training step in advance, so that the other ranks, which have traced it, need not wait."""
    strategy, reading, caller = strategy_of(model), fits.reading_of(model), model.train_function
    if strategy is None or reading is None or not isinstance(caller, failing_together.Caller):
        return
    if strategy.job.shards_from_elements is not None:
        return
    try:
        with garbage.paused():
            caller.trace_ahead(reading.iterator.batch_rows)
            if (traced := caller.common_trace()) is not None:
                caller.cut_step.trace_digest(traced.concrete, [])  # the result is cached
        gc.collect()  # otherwise Python collects while the others wait
    except Exception:  # the program's code may lack the other ranks' state, so all ranks trace it again together
        caller.forget_traces()
