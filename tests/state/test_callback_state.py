"""What a checkpoint and a rank that joins get of callbacks, by one name for each."""

from __future__ import annotations

import json
from typing import Any

import keras
import numpy as np

from keras_ddl.state import callback_state
from keras_ddl.state.callback_state import Changes, for_checkpoint, named, set_states, with_state


class Counter(keras.callbacks.Callback):
    """Has a state of its own."""

    def __init__(self, count: int = 0) -> None:
        super().__init__()
        self._counts = {"count": count}

    def get_state(self) -> dict[str, int]:
        return self._counts

    def set_state(self, state: dict[str, int]) -> None:
        self._counts = dict(state)


class Plain(keras.callbacks.Callback):
    """Has plain attributes, and one that is none."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []
        self.weights = np.zeros(3)
        self.own = object()


def callbacks() -> list[Any]:
    return [Plain(), keras.callbacks.EarlyStopping(), Counter(), keras.callbacks.EarlyStopping(), Counter(), Plain()]


def test_the_names_are_those_of_checkpoints() -> None:
    """Of callbacks with state alone, as in earlier checkpoints. A rank that joins numbers each class by itself."""
    some = callbacks()
    assert list(with_state(some)) == ["EarlyStopping", "Counter", "EarlyStopping 2", "Counter 3"]
    assert list(named(some)) == ["Plain", "EarlyStopping", "Counter", "EarlyStopping 2", "Counter 2", "Plain 2"]


def test_a_checkpoint_keeps_the_states_as_json() -> None:
    some, others = callbacks(), callbacks()
    some[1].best, some[1].wait, some[2]._counts = np.float32(0.5), 3, {"count": 7}
    states = json.loads(json.dumps(for_checkpoint(some)))
    assert states["EarlyStopping"]["best"] == 0.5 and states["Counter"] == {"": {"count": 7}}
    set_states(with_state(others), {**states, "Counter 3": None})
    assert (others[1].best, others[1].wait, others[2]._counts) == (0.5, 3, {"count": 7})
    assert others[3].wait == 0 and others[4]._counts == {"count": 0}


def test_a_rank_that_joins_gets_what_has_changed() -> None:
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
    assert losses == [0.5] and others[0].losses is losses, "a list that others may have, too"
    assert others[0].weights[1] == 2.0 and others[2]._counts == {"count": 4}
    assert callback_state.plain_attributes(others[5])["losses"] == []
