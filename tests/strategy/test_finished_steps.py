"""All ranks finish a step before callbacks that may write or change state run (callbacks.py).

A rank that is behind receives the step's results from another rank. They must not include changes by callbacks, because
its own callbacks will make these changes again.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import keras
import pytest

from keras_ddl import communicator
from keras_ddl.strategy import agreement, resilience
from keras_ddl.strategy.keras_patches import callbacks as patched

MOMENTS = {
    "on_epoch_end": (0,),
    "on_test_end": (),
    "on_predict_end": (),
    "on_train_batch_end": (0,),
    "on_test_batch_end": (0,),
    "on_predict_batch_end": (0,),
}


class Spy(keras.callbacks.Callback):
    """Records which of its methods are events_of."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        for name in MOMENTS:
            setattr(self, name, lambda *_, name=name, **__: events.append(name))


def events_of(moment: str, monkeypatch: pytest.MonkeyPatch, *, goes_on: bool) -> list[str]:
    """Calls `moment` of a list with callbacks that may stop training at any batch; returns the events."""
    events: list[str] = []
    strategy = SimpleNamespace(rank=0, job=SimpleNamespace(goes_on=goes_on), resilience=resilience.Resilience())
    monkeypatch.setattr(patched, "strategy_of_ranks", lambda _: strategy)
    monkeypatch.setattr(patched, "strategy_of", lambda _: None)
    monkeypatch.setattr(communicator, "barrier", lambda name: events.append("barrier"))
    monkeypatch.setattr(agreement, "any_rank", lambda *_: events.append("agree") or False)
    monkeypatch.setattr(agreement, "name_of", lambda _, name: name)
    monkeypatch.setattr(patched.accumulation, "combine", lambda _: None)
    monkeypatch.setattr(patched.CallbackList, "_begin_loop", lambda *_: None)  # it would compare weights between ranks
    monkeypatch.setattr(patched.CallbackList, "_model", SimpleNamespace(), raising=False)
    callbacks: Any = patched.CallbackList([Spy(events)])
    callbacks._ask_to_stop = frozenset({"train", "test", "predict"})
    callbacks._drift = SimpleNamespace(after_batch=lambda: None, after_epoch=lambda: None)
    callbacks._saves = SimpleNamespace(before_batch_end=lambda _: False, gathered_slots=contextlib.nullcontext)
    if moment != "on_epoch_end":
        getattr(callbacks, moment.replace("_end", "_begin"))(*MOMENTS[moment], {})
        events.clear()
    getattr(callbacks, moment)(*MOMENTS[moment], {})
    return events


@pytest.mark.parametrize("moment", MOMENTS)
def test_all_ranks_finish_a_step_before_callbacks_may_write(moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a lost rank ends the job, no barrier is needed."""
    assert events_of(moment, monkeypatch, goes_on=True)[:2] == ["barrier", moment]
    assert events_of(moment, monkeypatch, goes_on=False)[0] == moment
