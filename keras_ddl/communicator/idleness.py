"""For how long this process has certainly done nothing but wait for collectives.

Ranks that wait for one another in different collectives can be told at once, and not after the deadline, if it is
certain that none of them will submit anything else. That takes evidence; where a thread may be doing something, or
nobody knows, the answer is 0:

- The main thread waits for a collective, or for a call of TensorFlow that contains one.
- No other thread runs the program's code, or waits in it for a time that will end.
- No thread of the process but ours has wanted a core to speak of, or waits for a disk, since the last query. Time in
  the queue of a busy core counts as wanted.
- The process has no accelerator open, which could compute without any thread.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from types import FrameType

from keras_ddl.communicator import stack_position

# The innermost function of a main thread that waits for collectives: file and name. One that has a limit in `seconds`
# is about to do something else.
_WAITS_IN = (
    (f"{os.sep}keras_ddl{os.sep}communicator{os.sep}requests.py", "_wait"),
    (f"{os.sep}keras_ddl{os.sep}communicator{os.sep}started.py", "wait"),
    (f"{os.sep}tensorflow{os.sep}python{os.sep}eager{os.sep}execute.py", "quick_execute"),
    (f"{os.sep}tensorflow{os.sep}python{os.sep}eager{os.sep}execute.py", "execute_with_cancellation"),
)
# The communication threads, which poll. The core gives them this name.
_OURS = "keras_ddl"
_TASKS = Path("/proc/self/task")
_ACCELERATORS = ("/dev/nvidia", "/dev/kfd", "/dev/dri", "/dev/accel", "/dev/vfio")
# Of the time since the last query, the part that idle threads may want for what they do now and then.
_IDLE_SHARE = 0.2
_LEAST_SECONDS, _MOST_SECONDS = 1.0, 15.0  # between two queries that are compared


class Idleness:
    """What was seen at the last query. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked = 0.0
        self._wanted: dict[str, float] = {}
        self._since: float | None = None  # when it was first seen idle

    def seconds(self) -> float:
        """Returns for how long it has been idle, 0.0 for not at all or not known. Takes milliseconds."""
        with self._lock:
            now = time.monotonic()
            wanted = _wanted_seconds() if _threads_wait() and not _has_accelerator() else None
            if wanted is None:
                self._since = None
                return 0.0
            elapsed = now - self._asked
            if self._since is None or elapsed > _MOST_SECONDS:
                self._asked, self._wanted, self._since = now, wanted, now
            elif elapsed >= _LEAST_SECONDS:
                more = sum(seconds - self._wanted.get(thread, 0.0) for thread, seconds in wanted.items())
                if more > _IDLE_SHARE * elapsed:
                    self._since = now
                self._asked, self._wanted = now, wanted
            return self._asked - self._since


def _threads_wait() -> bool:
    frames = sys._current_frames()
    frames.pop(threading.get_ident(), None)
    main = frames.pop(threading.main_thread().ident or 0, None)
    if main is None or not _waits_for_collectives(main):
        return False
    # Others that run Python are called from C++, as tf.py_function is.
    started = {each.ident for each in threading.enumerate() if not isinstance(each, threading._DummyThread)}
    return all(
        _waits_without_end(frame) or (thread in started and stack_position.users_frame(frame) is None)
        for thread, frame in frames.items()
    )


def _waits_for_collectives(frame: FrameType) -> bool:
    code = frame.f_code
    there = any(code.co_filename.endswith(file) and code.co_name == name for file, name in _WAITS_IN)
    return there and frame.f_locals.get("seconds") is None


def _waits_without_end(frame: FrameType) -> bool:
    """Whether it waits for another thread of this process, be it as long as it may."""
    code = frame.f_code
    return (
        code.co_filename == threading.__file__ and code.co_name == "wait" and frame.f_locals.get("timeout", 0) is None
    )


def _wanted_seconds() -> dict[str, float] | None:
    """Returns, of each thread but ours, how long it has run or waited for a core.

    None: one waits for a disk, or this is not known.
    """
    own = str(threading.get_native_id())
    wanted = {}
    for task in _TASKS.iterdir():
        try:
            name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
            if name == _OURS or task.name == own:
                continue
            if rest.split()[0] == "D":
                return None
            ran, queued = (task / "schedstat").read_text().split()[:2]
        except FileNotFoundError:
            if task.exists():
                return None  # a kernel that does not say
            continue
        except (OSError, ValueError):
            continue
        wanted[task.name] = (int(ran) + int(queued)) * 1e-9
    return wanted


def _has_accelerator() -> bool:
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if str(entry.readlink()).startswith(_ACCELERATORS):
                return True
        except OSError:  # closed meanwhile
            continue
    return False
