"""Where this process's main thread is, for the message about a collective that a rank does not come to.

Rank 0 asks through the native library, which hands the question to a thread that waits in C without the interpreter's
lock. If the main thread keeps that lock, in some library's C code, the answer never comes, and rank 0 says just that.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

_PACKAGE = str(Path(__file__).parents[1])
_LIBRARY_PARTS = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}", "__autograph_generated_file")
_LIBRARY_FOLDERS = tuple(
    folder + os.sep for folder in {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), _PACKAGE}
)


def answer_questions(next_question: Callable[[], bool], answer: Callable[[str], None]) -> None:
    """Answers until `next_question`, which blocks, returns False."""
    while next_question():
        try:
            text = main_thread()
        except Exception as error:  # a frame that changes under the reader must not end the thread
            text = f"a line that could not be found ({type(error).__name__})"
        answer(text)


def main_thread() -> str:
    """Returns e.g. "train.py:12 in step": the innermost line of the user's own code, else of a library's.

    With a library in between, its innermost line follows: "train.py:12 in step (inside threading.py:373 in wait)".
    """
    innermost = sys._current_frames().get(threading.main_thread().ident)
    if innermost is None:
        return "no line of Python: its main thread has ended"
    frame: FrameType | None = innermost
    while frame is not None and _is_library(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None or frame is innermost:
        return _position(innermost)
    return f"{_position(frame)} (inside {_position(innermost)})"


def user_line(frames: Any) -> str | None:
    """Returns e.g. "train.py:12": of a traceback's frames, innermost last, the innermost one of the user's own code."""
    for frame in reversed(list(frames or ())):
        if not _is_library(frame.filename):
            return f"{_short(frame.filename)}:{frame.lineno}"
    return None


def _is_library(path: str) -> bool:
    return path.startswith(("<frozen", *_LIBRARY_FOLDERS)) or any(part in path for part in _LIBRARY_PARTS)


def _position(frame: FrameType) -> str:
    code = frame.f_code
    name = code.co_qualname.replace("<locals>.", "")
    where = f" in {name}" if name != "<module>" else ""
    return f"{_short(code.co_filename)}:{frame.f_lineno}{where}"


def _short(path: str) -> str:
    """The path below the working directory, that of a file of keras_ddl, the last two parts of a library's, or all."""
    if path.startswith(_PACKAGE + os.sep):
        return str(Path(path).relative_to(Path(_PACKAGE).parent))
    if _is_library(path):
        return str(Path(*Path(path).parts[-2:]))
    try:
        return str(Path(path).relative_to(Path.cwd()))
    except (OSError, ValueError):  # elsewhere, or no file
        return path
