"""Which frames of a traceback are shown."""

from __future__ import annotations

import traceback
from pathlib import Path

import pytest

import keras_ddl
from keras_ddl import config
from keras_ddl.communicator.reporting import shown_frames

HOME = Path(keras_ddl.__file__).parent


def program(text: str) -> None:
    try:
        config.get("DEADLINE_SECONDS", {"KERAS_DDL_DEADLINE_SECONDS": text})
    except ValueError as error:
        raise RuntimeError("of the program") from error


def error_of(text: str) -> RuntimeError:
    with pytest.raises(RuntimeError) as caught:
        program(text)
    return caught.value


def test_frames_of_keras_ddl_are_left_out_also_of_the_cause() -> None:
    error = error_of("soon")
    assert shown_frames.leave_out(error)
    lines = "".join(traceback.format_exception(error))
    assert f'File "{HOME}' not in lines and f'File "{__file__}"' in lines and "must be a number of seconds" in lines


def test_all_frames_are_shown_where_they_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_DDL_ALL_FRAMES", "1")
    error = error_of("soon")
    assert not shown_frames.leave_out(error)
    assert f'File "{HOME}/config.py"' in "".join(traceback.format_exception(error))


def test_an_error_that_no_code_of_the_program_has_seen_keeps_its_frames() -> None:
    cause = error_of("soon").__cause__
    assert cause is not None and cause.__traceback__ is not None
    cause.__traceback__ = cause.__traceback__.tb_next  # without that of this file
    assert not shown_frames.leave_out(cause) and cause.__traceback__ is not None
    shown_frames.leave_out(cause, continues=True)
    assert cause.__traceback__ is None


def test_frames_in_a_message_of_tensorflow_are_left_out() -> None:
    message = (
        "Graph execution error:\n\nDetected at node Relu defined at (most recent call last):\n"
        f'  File "train.py", line 8, in <module>\n\n  File "{HOME}/strategy/__init__.py", line 81, in run\n'
        f'    return run()\n\n  File "{HOME}/cut/building/builder.py", line 1, in build\n\n'
        "Not a matrix\n\t [[node Relu]]"
    )
    shown = shown_frames.text_without(message)
    assert str(HOME) not in shown and "return run()" not in shown and shown.endswith("Not a matrix\n\t [[node Relu]]")
    assert '  File "train.py", line 8, in <module>\n\n' in shown
