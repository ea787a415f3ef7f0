"""Measures how long this process has certainly done nothing but wait for collectives.

The coordinator uses this to detect, before the deadline, ranks that wait for each other in different collectives: it
must be certain that none of them will submit anything else. A process counts as idle only while all of this holds:

- The main thread waits for a collective, or for a call of TensorFlow that contains one.
- No other thread runs the program's code, or waits in it with a timeout.
- Since the last query, no thread has used or waited for a core for more than a small share of the time, and none waits
  for a disk. Polling threads of keras_ddl do not count: on a busy machine they wait for a core in every round.
- The process has no accelerator open, which could compute without any thread.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, TypeVar

from keras_ddl.communicator.reporting import stack_position

_Function = TypeVar("_Function", bound=Callable[..., Any])
_waiting_functions: set[CodeType] = set()
# TensorFlow may not be imported, so its functions are known by file and name.
_TENSORFLOW = f"{os.sep}tensorflow{os.sep}python{os.sep}eager{os.sep}execute.py"
_WAITING_IN_TENSORFLOW = ("quick_execute", "execute_with_cancellation")
# Polling threads: the name that the core gives to its communication threads, and the ids of Python threads.
_OURS = "keras_ddl"
_polling: set[str] = set()
_TASKS = Path("/proc/self/task")
_ACCELERATORS = ("/dev/nvidia", "/dev/kfd", "/dev/dri", "/dev/accel", "/dev/vfio")
# The share of the time since the last query in which threads may be runnable although the process counts as idle.
_IDLE_SHARE = 0.2
_LEAST_SECONDS, _MOST_SECONDS = 1.0, 15.0  # between two compared queries


def waits_for_collectives(function: _Function) -> _Function:
    """Marks a function that only waits for collectives. With a timeout (`seconds`) the wait does not count, because the
    thread will then do something else.
    """
    _waiting_functions.add(function.__code__)
    return function


def this_thread_polls() -> None:
    """Called by a thread of keras_ddl that polls: its time does not count as work."""
    _polling.add(str(threading.get_native_id()))


class Idleness:
    """The state of this process at the last query. May be used from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queried = 0.0
        self._runnable: dict[str, float] = {}
        self._since: float | None = None  # the first query at which it was idle

    def seconds(self) -> float:
        """Returns how long the process has certainly been idle, or 0.0 if it may be busy. Takes milliseconds."""
        with self._lock:
            now = time.monotonic()
            runnable = _runnable_seconds() if _threads_wait() and not _has_accelerator() else None
            if runnable is None:
                self._since = None
                return 0.0
            elapsed = now - self._queried
            if self._since is None or elapsed > _MOST_SECONDS:
                self._queried, self._runnable, self._since = now, runnable, now
            elif elapsed >= _LEAST_SECONDS:
                more = sum(seconds - self._runnable.get(thread, 0.0) for thread, seconds in runnable.items())
                if more > _IDLE_SHARE * elapsed:
                    self._since = now
                self._queried, self._runnable = now, runnable
            return self._queried - self._since


def _threads_wait() -> bool:
    frames = sys._current_frames()
    frames.pop(threading.get_ident(), None)
    main = frames.pop(threading.main_thread().ident or 0, None)
    if main is None or not _waits_for_collectives(main):
        return False
    # C++ threads that call into Python, as for tf.py_function, are not started by Python.
    started = {each.ident for each in threading.enumerate() if not isinstance(each, threading._DummyThread)}
    return all(
        _waits_without_timeout(frame) or (thread in started and stack_position.users_frame(frame) is None)
        for thread, frame in frames.items()
    )


def _waits_for_collectives(frame: FrameType) -> bool:
    code = frame.f_code
    in_tensorflow = code.co_name in _WAITING_IN_TENSORFLOW and code.co_filename.endswith(_TENSORFLOW)
    return (in_tensorflow or code in _waiting_functions) and frame.f_locals.get("seconds") is None


def _waits_without_timeout(frame: FrameType) -> bool:
    """Whether `frame` waits for another thread of this process without a timeout."""
    code = frame.f_code
    return (
        code.co_filename == threading.__file__ and code.co_name == "wait" and frame.f_locals.get("timeout", 0) is None
    )


def _runnable_seconds() -> dict[str, float] | None:
    """Returns how long each thread, except polling ones of keras_ddl, has run or waited for a core.

    None: a thread waits for a disk, or the kernel does not provide these numbers.
    """
    own = str(threading.get_native_id())
    runnable = {}
    for task in _TASKS.iterdir():
        try:
            name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
            if name == _OURS or task.name == own or task.name in _polling:
                continue
            if rest.split()[0] == "D":
                return None
            ran, queued = (task / "schedstat").read_text().split()[:2]
        except FileNotFoundError:
            if task.exists():
                return None
            continue
        except (OSError, ValueError):
            continue
        runnable[task.name] = (int(ran) + int(queued)) * 1e-9
    return runnable


def _has_accelerator() -> bool:
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if str(entry.readlink()).startswith(_ACCELERATORS):
                return True
        except OSError:  # already closed
            continue
    return False
