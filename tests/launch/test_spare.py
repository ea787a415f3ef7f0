"""Imports that a spare makes in advance, and callback state that a newcomer takes over."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import keras
import numpy as np
import pytest

from keras_ddl.launch.rank import spare
from keras_ddl.launch.rank.spare import imports_of_script
from keras_ddl.state.callback_state import Changes, named, set_states

SCRIPT = """
\"\"\"Trains.\"\"\"
from __future__ import annotations
import json, numpy as np
from keras.layers import Dense
from . import sibling
from own_module import data
import not_installed_anywhere
def main():
    import csv
"""


def test_spare_imports_the_scripts_installed_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_module.py").write_text("data = open('of the script')")
    monkeypatch.syspath_prepend(str(tmp_path))
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    names = imports_of_script(["python", "-u", str(script), "--epochs", "3"])
    assert names == ["__future__", "json", "numpy", "keras.layers"]


@pytest.mark.parametrize("command", [["python", "-m", "train"], ["python", "absent.py"], ["sh", "-c", "python x.py"]])
def test_spare_imports_nothing_if_it_cannot_read_the_script(command: list[str]) -> None:
    assert imports_of_script(command) == []


def test_spare_imports_a_newcomers_modules_before_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(spare.importlib, "import_module", done.append)
    monkeypatch.setattr(spare.membership, "start", lambda: done.append("is needed"))
    monkeypatch.setattr(spare.sys, "orig_argv", ["python", "-m", "train"])
    spare.wait_until_needed()
    assert done == ["keras_ddl.strategy", "is needed"]


def test_newcomer_takes_over_callback_state_since_fit_began() -> None:
    def callback_on(rank: int) -> keras.callbacks.Callback:
        callback = keras.callbacks.Callback()
        callback.rank, callback.seen, callback.best = rank, 0, None
        callback.choose, callback.lock = keras.ops.less, object()
        return callback

    mine, theirs = callback_on(2), callback_on(0)
    at_begin = Changes([theirs])
    theirs.seen, theirs.best, theirs.choose = 5, [np.arange(2.0)], keras.ops.greater
    theirs.lock = object()
    set_states(named([mine]), at_begin.since([theirs]))
    assert (mine.rank, mine.seen, mine.choose) == (2, 5, keras.ops.greater)
    np.testing.assert_array_equal(mine.best[0], [0.0, 1.0])
    assert mine.lock is not theirs.lock


def test_callbacks_of_one_class_are_distinguished_and_others_unchanged() -> None:
    mine = [keras.callbacks.EarlyStopping(), keras.callbacks.EarlyStopping()]
    theirs = [keras.callbacks.TerminateOnNaN(), keras.callbacks.EarlyStopping(), keras.callbacks.EarlyStopping()]
    at_begin = Changes(theirs)
    theirs[0].seen, theirs[2].wait = 1, 3
    set_states(named(mine), at_begin.since(theirs))
    assert [each.wait for each in mine] == [0, 3] and not hasattr(mine[0], "seen")


def test_process_local_attributes_are_not_taken_over() -> None:
    mine, theirs = (
        SimpleNamespace(of_this_process=("begun",), begun=each, saved=each, params={"verbose": each}) for each in (1, 2)
    )
    set_states(named([mine]), Changes([]).since([theirs]))
    assert (mine.begun, mine.saved, mine.params) == (1, 2, {"verbose": 1})
