"""The state that newcomers get, and what members and newcomers reset when a newcomer joins (joining.py)."""

from __future__ import annotations

import gc
import pickle
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np

from keras_ddl import communicator
from keras_ddl.communicator.comparison import digest
from keras_ddl.compat import epoch_iterators
from keras_ddl.data import order
from keras_ddl.errors import CollectiveError, RankMismatchError
from keras_ddl.resilience.joining_base import Joining, give_up
from keras_ddl.resilience.survival import Survival
from keras_ddl.state.callback_state import Changes
from keras_ddl.state.replicate import numbers_of, replicate
from keras_ddl.strategy import agreement
from keras_ddl.strategy.base import strategy_of
from keras_ddl.strategy.calls import fits
from keras_ddl.strategy.keras_patches.callbacks import CallbackList
from keras_ddl.strategy.shards import sharded_slots
from keras_ddl.strategy.step import failing_together

STATE = "keras_ddl/joining/state"  # name of its broadcast


@dataclass
class State:
    """The state that a newcomer gets.

    Attributes:
        callbacks: attributes of the callbacks.
        agreed: attributes of the objects that the list of callbacks has agreed on.
        slots: the numbers of the variables in shards, whose values the newcomer gets later (state/generations.py).
    """

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
    slots: tuple[list[int | None], int]


class JoiningInFit(Joining):
    """Base class for members and newcomers, while a fit runs.

    _callbacks: the callbacks of the outermost fit, once its on_train_begin has run.
    """

    def __init__(self, survival: Survival) -> None:
        self._survival = survival
        self._callbacks: CallbackList | None = None
        self._compares_batch = False
        self._is_new = False  # this rank has joined, and has made no step yet
        self._changes = Changes([])

    def begin_fit(self, callbacks: CallbackList) -> None:
        if fits.is_outermost(callbacks.model):
            self._callbacks = callbacks
            self._changes = Changes(callbacks.callbacks)

    def _forget_state(self, callbacks: CallbackList) -> None:
        """Forgets state that a newcomer cannot have.

        All ranks that have met a newcomer call this between the same two calls, even if the newcomer is lost meanwhile.
        """
        # All ranks trace together from now on: variables get rank 0's values when a step first uses them.
        failing_together.forget_all_traces(but=callbacks.model.train_function)  # see agree_on_trace
        order.forget_notes()
        # All ranks read validation data from its beginning.
        epoch_iterators.forget_validation(callbacks.model)
        self._compares_batch = True

    def agree_on_trace(self, callbacks: CallbackList, caller: failing_together.Caller) -> None:
        """Keeps the training step's trace if all ranks have the same trace. COLLECTIVE over all ranks and newcomers."""
        variables, traced, digest, reads = agreement.all_variables(callbacks.model), caller.common_trace(), None, b""
        if traced is not None:
            values = [each.value for each in variables]
            trace_digest, reads = caller.cut_step.trace_digest(traced.concrete, values)
            digest = traced.kind, trace_digest
        digests, reads_of_ranks = zip(*communicator.all_gather_object((digest, reads), name="keras_ddl/joining/trace"))
        is_same = traced is not None and all(each == digest for each in digests)
        if is_same and self._is_new and reads != reads_of_ranks[0]:
            give_up(
                RankMismatchError(
                    "In a step, a rank that joins a running job must read the same values as the other ranks. "
                    "Received: a step that reads tensors or lookup tables that differ from theirs. Seed everything "
                    "that draws random numbers: keras.utils.set_random_seed(n)."
                )
            )
        if traced is None or not is_same:
            caller.forget_traces()
            return
        equal = {each.value.ref() for each in variables}
        others = [each for each in caller.cut_step.keep_only(traced.concrete) if each.ref() not in equal]
        self._survival.call(lambda: replicate(numbers_of(sharded_slots.whole(others))), lambda: others)


def remember(model: Any) -> None:
    """Remembers that a call of fit, evaluate or predict of `model` begins."""
    is_equal_on_all = strategy_of(model) is not None
    if is_equal_on_all and all(each() is not model for each in _models):
        _models.append(weakref.ref(model))


_models: list[weakref.ref[Any]] = []  # in order of first use, which is equal on all ranks


def share_variables(model: Any, giver: int) -> None:
    """Gives newcomers the variables of `model` and of all models of earlier calls. COLLECTIVE over all ranks.

    Variables that a newcomer could not build get their values when a step first uses them.
    """
    models = [each() for each in _models]
    assert any(each is model for each in models)
    mine = [None if each is None else digest(pickle.dumps(agreement.descriptions(each))) for each in models]
    everyone = communicator.all_gather_object(mine, name="keras_ddl/joining/models")
    for place, each in enumerate(models):
        if each is not None and all(theirs[place] == mine[place] for theirs in everyone):
            variables = [v for v in agreement.all_variables(each) if sharded_slots.slot_of(v) is None]
            agreement.broadcast_variables(variables, giver)
    gc.collect()  # newcomers lack the slots of deleted models, which need not be shared out


def number_slots(model: Any, slots: tuple[list[int | None], int]) -> None:
    """Gives the slots in shards of a newcomer's model the numbers that the slots have on the other ranks."""
    if not sharded_slots.number_as(agreement.all_variables(model), slots):
        raise CollectiveError(
            "A rank that joins a running job must make the same optimizers as the other ranks. Received: optimizer "
            "variables in shards that differ from theirs. Give the model an Input, or call model.build(input_shape)."
        )
