"""Calls of fit, evaluate and predict in a job that admits newcomers.

The job's record holds the result of a call instead of everything that ranks exchange during the call. A newcomer gets
the results of all calls that the other ranks have finished (communicator/newcomers/history.py).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeGuard

from keras_ddl.communicator.newcomers import history
from keras_ddl.compat import models
from keras_ddl.compat.keras import keras
from keras_ddl.errors import RankLostError
from keras_ddl.resilience import joining, joining_state
from keras_ddl.resilience.joining_base import give_up
from keras_ddl.resilience.survival import Survival
from keras_ddl.state import callback_state
from keras_ddl.strategy import agreement
from keras_ddl.strategy.base import strategy_of
from keras_ddl.strategy.calls import trainer_calls
from keras_ddl.strategy.shards import sharded_slots

_LOOK_SECONDS = 0.1
_RECORDED_BYTES = 1 << 20  # limit of one attribute, which leaves out weights that a callback keeps


def call_of_trainer(
    survival: Survival, method: str, model: Any, call: Callable[[], Any], callbacks: Callable[[], list[Any]] = list
) -> Any:
    """Runs a call of fit, evaluate or predict.

    If this is a newcomer and the others have ended the call, returns their result instead and gives `callbacks` what
    the others' callbacks stored during the call.
    """
    recorded = history.current()
    if recorded is None or trainer_calls.running():
        return call()
    what = f"Model.{method}"
    recorded.begin_call()
    joining_state.remember(model)
    used_callbacks = callbacks()
    changes = callback_state.Changes(used_callbacks)
    if isinstance(recorded, history.Replay):
        while not recorded.has_ended(what):
            if method == "fit":
                break
            time.sleep(_LOOK_SECONDS)
        else:
            return _take(recorded.result(what), model, used_callbacks)
        try:
            returned = call()
        except joining.CallHasEnded:
            return _take(recorded.result(what), model, used_callbacks)
        except Exception as error:
            if survival.joining.is_on_its_way or _is_newcomers_own(error, survival):
                give_up(error)
            raise
        recorded = history.current()
        if not isinstance(recorded, history.Record):  # a fit without a step
            return returned
    else:
        try:
            returned = call()
        except BaseException as error:
            if _is_newcomers_own(error, survival):
                give_up(error)
            recorded.close("a call of fit, evaluate or predict that has failed")
            raise
    recorded.end_call(what, _ended(returned, model, changes.since(used_callbacks, _RECORDED_BYTES)))
    return returned


def _is_newcomers_own(error: BaseException, survival: Survival) -> TypeGuard[Exception]:
    """Whether this rank is a newcomer, and the error is its own, for example from a callback."""
    if not isinstance(error, Exception):  # SystemExit: this rank was asked to leave, and is no longer in a job
        return False
    return survival.is_on_trial and not hasattr(error, "failed_rank") and not isinstance(error, RankLostError)


@dataclass
class _History:
    """The picklable content of the History that fit returns."""

    history: dict[str, Any]
    epoch: list[int]
    params: dict[str, Any]


@dataclass
class _Ended:
    """A call that has ended: its result, the parts of its model that were built, and state that callbacks stored."""

    returned: Any
    build_config: dict[str, Any] | None
    optimizers: dict[str, list[int | None]]
    slots: tuple[list[int | None], int]
    callbacks: dict[str, dict[str, Any]]


def _ended(returned: Any, model: Any, stored: dict[str, dict[str, Any]]) -> _Ended:
    if isinstance(returned, keras.callbacks.History):
        returned = _History(returned.history, returned.epoch, returned.params)
    slots = sharded_slots.numbers_in(agreement.all_variables(model))
    return _Ended(returned, models.build_config(model), agreement.built_optimizers(model), slots, stored)


def _take(ended: _Ended, model: Any, callbacks: list[Any]) -> Any:
    """Builds the newcomer's model as the call did, and returns the result of the call."""
    callback_state.set_states(callback_state.named(callbacks), ended.callbacks)
    strategy = strategy_of(model)
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        models.build_as(model, ended.build_config)
    if models.is_built(model):
        agreement.build_optimizers(model, ended.optimizers)
    joining_state.number_slots(model, ended.slots)
    if not isinstance(ended.returned, _History):
        return ended.returned
    made = keras.callbacks.History()
    made.set_model(model)
    made.history, made.epoch = ended.returned.history, ended.returned.epoch
    made.set_params(ended.returned.params)
    model.history = made
    return made
