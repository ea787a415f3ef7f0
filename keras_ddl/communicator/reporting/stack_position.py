"""Finds the line of the user's own code that this process is running, for warnings and for reports about missing ranks.

Rank 0 asks a rank that does not arrive at a collective for its position. The native library passes the query to a
thread that waits in C without the interpreter's lock. If the main thread holds that lock in a library's C code, there
is no reply, and rank 0 reports so.

The user's own code excludes the standard library, installed packages, keras_ddl and code without a file, such as the
functions that TensorFlow generates for ops ("<string>"). If nothing else exists (`python -c`), such code counts.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from keras_ddl import parts

_PACKAGE = str(Path(__file__).parents[2])
_LIBRARY_PARTS = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}", "__autograph_generated_file")
_STANDARD = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), str(Path(os.__file__).parent)}
_FOLDERS = {*parts.sources(), *(folder + os.sep for folder in _STANDARD)}
_LIBRARY_FOLDERS = tuple(_FOLDERS | {f"{os.path.realpath(each)}{os.sep * each.endswith(os.sep)}" for each in _FOLDERS})
_TYPED_IN = ("<stdin>", "<ipython-input")


def reply_to_queries(next_query: Callable[[], bool], reply: Callable[[str], None]) -> None:
    """Replies until `next_query`, which blocks, returns False."""
    while next_query():
        try:
            text = main_thread()
        except Exception as error:  # frames may change while they are read, which must not end the thread
            text = f"an unknown line ({type(error).__name__})"
        reply(text)


def main_thread() -> str:
    """Returns e.g. "train.py:12 in step": the innermost line of the user's own code, else of a library.

    If that line has called a library, the library's innermost line follows: "train.py:12 in step (inside
    threading.py:373 in wait)".
    """
    innermost = sys._current_frames().get(threading.main_thread().ident or 0)
    if innermost is None:
        return "no line of Python: its main thread has ended"
    frame = users_frame(innermost)
    if frame is None or frame is innermost:
        return _position(innermost)
    return f"{_position(frame)} (inside {_position(innermost)})"


def user_line(frames: Any) -> str | None:
    """Returns the innermost line of the user's own code in a traceback's frames (innermost last): "train.py:12"."""
    outward = list(frames or ())[::-1]
    index = _users([frame.filename for frame in outward])
    return None if index is None else f"{_short(outward[index].filename)}:{outward[index].lineno}"


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns as `warnings.warn`, at the innermost line of the user's own code in this thread."""
    caller = sys._getframe(1)
    frame = users_frame(caller) or caller
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    module = frame.f_globals.get("__name__") or "<unknown>"
    warnings.warn_explicit(message, category, frame.f_code.co_filename, frame.f_lineno, module, registry)


def users_frame(innermost: FrameType) -> FrameType | None:
    """Returns the innermost frame of the user's own code, given a thread's innermost frame; None without one."""
    frames = list(_outward(innermost))
    index = _users([frame.f_code.co_filename for frame in frames])
    return None if index is None else frames[index]


def _outward(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _users(paths: list[str]) -> int | None:
    """Returns the index in `paths` (innermost first) of the user's own file, else of the outermost code without one."""
    own = (index for index, path in enumerate(paths) if not _is_library(path))
    without_file = (index for index in reversed(range(len(paths))) if paths[index] == "<string>")
    return next(own, next(without_file, None))


def _is_library(path: str) -> bool:
    if path.startswith("<"):
        return not path.startswith(_TYPED_IN)
    return path.startswith(_LIBRARY_FOLDERS) or any(part in path for part in _LIBRARY_PARTS)


def _position(frame: FrameType) -> str:
    code = frame.f_code
    name = code.co_qualname.replace("<locals>.", "")
    where = f" in {name}" if name != "<module>" else ""
    return f"{_short(code.co_filename)}:{frame.f_lineno}{where}"


def _short(path: str) -> str:
    """Returns the path relative to the working directory or the package, or the last two parts of a library's path."""
    if path.startswith(_PACKAGE + os.sep):
        return str(Path(path).relative_to(Path(_PACKAGE).parent))
    if _is_library(path) and not path.startswith("<"):
        return str(Path(*Path(path).parts[-2:]))
    try:
        return str(Path(path).relative_to(Path.cwd()))
    except (OSError, ValueError):  # outside these folders, or not a file
        return path
