"""State of callbacks for checkpoints and for ranks that join, with a unique name for each callback."""

from __future__ import annotations

import json
from typing import Any

import keras
import numpy as np

from keras_ddl.state import callback_state
from keras_ddl.state.callback_state import Changes, for_checkpoint, named, set_states, with_state


class Counter(keras.callbacks.Callback):
    """Implements get_state and set_state."""

    def __init__(self, count: int = 0) -> None:
        super().__init__()
        self._counts = {"count": count}

    def get_state(self) -> dict[str, int]:
        return self._counts

    def set_state(self, state: dict[str, int]) -> None:
        self._counts = dict(state)


class Plain(keras.callbacks.Callback):
    """Has plain attributes, and one that is not plain."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []
        self.weights = np.zeros(3)
        self.own = object()


def callbacks() -> list[Any]:
    return [Plain(), keras.callbacks.EarlyStopping(), Counter(), keras.callbacks.EarlyStopping(), Counter(), Plain()]


def test_names_match_those_in_checkpoints() -> None:
    """Checkpoints name callbacks with state, as earlier versions did; a joining rank numbers each class separately."""
    some = callbacks()
    assert list(with_state(some)) == ["EarlyStopping", "Counter", "EarlyStopping 2", "Counter 3"]
    assert list(named(some)) == ["Plain", "EarlyStopping", "Counter", "EarlyStopping 2", "Counter 2", "Plain 2"]


def test_checkpoint_stores_states_as_json() -> None:
    some, others = callbacks(), callbacks()
    some[1].best, some[1].wait, some[2]._counts = np.float32(0.5), 3, {"count": 7}
    states = json.loads(json.dumps(for_checkpoint(some)))
    assert states["EarlyStopping"]["best"] == 0.5 and states["Counter"] == {"": {"count": 7}}
    set_states(with_state(others), {**states, "Counter 3": None})
    assert (others[1].best, others[1].wait, others[2]._counts) == (0.5, 3, {"count": 7})
    assert others[3].wait == 0 and others[4]._counts == {"count": 0}


def test_joining_rank_receives_changed_attributes() -> None:
    some, others = callbacks(), callbacks()
    changes = Changes(some)
    assert not any(changes.since(some).values())
    some[0].losses.append(0.5)
    some[0].weights[1] = 2.0
    some[2]._counts["count"] = 4
    changed = changes.since(some)
    assert {name: sorted(each) for name, each in changed.items() if each} == {
        "Plain": ["losses", "weights"],
        "Counter": ["", "_counts"],
    }
    assert "weights" not in changes.since(some, most_bytes=20)["Plain"]
    losses = others[0].losses
    set_states(named(others), changed)
    assert losses == [0.5] and others[0].losses is losses, "the list is updated in place, because others may hold it"
    assert others[0].weights[1] == 2.0 and others[2]._counts == {"count": 4}
    assert callback_state.plain_attributes(others[5])["losses"] == []
