"""Calls of fit, evaluate and predict in a job that takes newcomers: what they return is recorded, in place of all that
is exchanged in them, and a newcomer gets it of those that the others have ended (communicator/history.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from keras_ddl.communicator import history
from keras_ddl.compat.keras import keras
from keras_ddl.strategy import joining, trainer_calls

_LOOK_SECONDS = 0.1


def call_of_trainer(method: str, model: Any, call: Callable[[], Any]) -> Any:
    """Runs a call of fit, evaluate or predict; in a newcomer, which the others have ended, returns what they got."""
    recorded = history.of_job()
    if recorded is None or trainer_calls.running():
        return call()
    what = f"Model.{method}"
    recorded.begin_call()
    if isinstance(recorded, history.Replay):
        while not recorded.has_ended(what):
            if method == "fit":
                break
            time.sleep(_LOOK_SECONDS)
        else:
            return _returned(recorded.result(what), model)
        try:
            returned = call()
        except joining.CallHasEnded:
            return _returned(recorded.result(what), model)
        except Exception as error:
            if joining.is_on_its_way():
                joining.give_up(error)
            raise
        recorded = history.of_job()
        if not isinstance(recorded, history.Record):  # a fit without a step
            return returned
    else:
        try:
            returned = call()
        except BaseException:
            recorded.close("a call of fit, evaluate or predict that has failed")
            raise
    recorded.end_call(what, _kept(returned))
    return returned


@dataclass
class _History:
    """What fit returns."""

    history: dict[str, Any]
    epoch: list[int]
    params: dict[str, Any]


def _kept(returned: Any) -> Any:
    if isinstance(returned, keras.callbacks.History):
        return _History(returned.history, returned.epoch, returned.params)
    return returned


def _returned(result: Any, model: Any) -> Any:
    if not isinstance(result, _History):
        return result
    made = keras.callbacks.History()
    made.set_model(model)
    made.history, made.epoch = result.history, result.epoch
    made.set_params(result.params)
    model.history = made
    return made
