"""Leaves the frames of keras_ddl, Keras and TensorFlow out of tracebacks, as Keras does with its own frames.

Only the program's own frames remain. All frames are shown after `keras.config.disable_traceback_filtering()`, with
KERAS_DDL_ALL_FRAMES=1, and for an error that has passed through no code of the program.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import TracebackType

from keras_ddl import config, parts
from keras_ddl.errors import ConfigError

_PACKAGES = ("keras", "tensorflow")
# Frames of `python -m`, and of functions that autograph has generated, whose errors name the original lines.
_GENERATED = ("<frozen runpy>", "__autograph_generated_file")
# A frame in an error message of TensorFlow. Its line of code and empty lines may follow.
_FRAME_IN_TEXT = re.compile(
    r'^ +File "(?P<file>[^"\n]*)", line \d+, in .*\n(?:(?: {4,}(?!File ").*)?\n)*', re.MULTILINE
)


def leave_out(error: BaseException, *, continues: bool = False) -> bool:
    """Leaves frames out of the tracebacks of `error` and its causes; returns whether it left out any.

    A cause may lose all frames, because its message stays. `error` may lose all its frames only if its traceback
    `continues`, that is, if the error has yet to pass through the program.
    """
    kept = _kept(error.__traceback__)
    if _shows_all() or (kept is None and error.__traceback__ is not None and not continues):
        return False
    leaves_out = _length(kept) < _length(error.__traceback__)
    error.__traceback__ = kept
    seen = {id(error)}
    waiting = [error.__cause__, error.__context__]
    while waiting:
        each = waiting.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            before, each.__traceback__ = each.__traceback__, _kept(each.__traceback__)
            leaves_out |= _length(each.__traceback__) < _length(before)
            waiting += [each.__cause__, each.__context__]
    return leaves_out


def text_without(text: str) -> str:
    """Returns a text, such as a message of TensorFlow, without the frames in it."""
    if _shows_all():
        return text
    return _FRAME_IN_TEXT.sub(lambda frame: "" if _is_hidden(frame["file"]) else frame[0], text)


def _shows_all() -> bool:
    keras_config = getattr(sys.modules.get("keras"), "config", None)
    is_enabled = getattr(keras_config, "is_traceback_filtering_enabled", None)  # absent while Keras is being imported
    try:
        return config.get("ALL_FRAMES") or (is_enabled is not None and not is_enabled())
    except ConfigError:  # keras_ddl.init() reports it; here it must not hide the shown error
        return True


def _kept(trace: TracebackType | None) -> TracebackType | None:
    frames = []
    while trace is not None:
        if not _is_hidden(trace.tb_frame.f_code.co_filename):
            frames.append(trace)
        trace = trace.tb_next
    kept = None
    for each in reversed(frames):
        kept = TracebackType(kept, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return kept


def _length(trace: TracebackType | None) -> int:
    count = 0
    while trace is not None:
        count, trace = count + 1, trace.tb_next
    return count


def _is_hidden(file: str) -> bool:
    if any(each in file for each in _GENERATED) or file.startswith(parts.sources()):
        return True
    homes = [getattr(sys.modules.get(name), "__file__", None) for name in _PACKAGES]
    return any(home is not None and Path(home).parent in Path(file).parents for home in homes)
