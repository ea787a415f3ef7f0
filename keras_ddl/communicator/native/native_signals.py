"""Handles signals such as Ctrl-C while the main thread runs a collective in the native library."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Generator
from types import FrameType, GeneratorType

INTERRUPTED = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)


class Interruption:
    """The callback with which the native library lets Python run signal handlers during a long collective.

    An exception that a handler raises (KeyboardInterrupt) must not leave the function that C calls: ctypes would print
    and drop it. It is stored for `reraise`. The callback must be a generator suspended inside a `try`, which is
    interrupted there: a plain function would be interrupted before its first line, outside of any `try`.

    A handler must not wait for the communicator: the collective continues only when the handler has returned.

    Only one thread at a time may use it in the native library. Outside the main thread, Python runs no handlers.
    """

    def __init__(self) -> None:
        self._caught: list[BaseException] = []
        self._afterwards: list[Callable[[], None]] = []
        steps = _run_handlers(self._caught)
        assert isinstance(steps, GeneratorType)  # for gi_running and gi_frame
        self._steps = steps
        next(self._steps)
        self.function = INTERRUPTED(self._steps.send)

    def is_handling(self) -> bool:
        """Whether the caller runs inside a signal handler in the middle of a collective."""
        if not self._steps.gi_running:
            return False
        frame: FrameType | None = sys._getframe()  # another thread may be running the collective
        while frame is not None and frame is not self._steps.gi_frame:
            frame = frame.f_back
        return frame is not None

    def give_up(self, error: BaseException, afterwards: Callable[[], None]) -> None:
        """Called by a handler: aborts the collective; `reraise` then calls `afterwards` and raises `error`."""
        self._caught.append(error)
        self._afterwards.append(afterwards)

    def reraise(self) -> None:
        """Called in the main thread: raises a handler's first exception since the last call, if any."""
        if self._caught and threading.current_thread() is threading.main_thread():
            error, afterwards = self._caught[0], [*self._afterwards]
            self._caught.clear()
            self._afterwards.clear()
            for call in afterwards:
                call()
            raise error


def _run_handlers(caught: list[BaseException]) -> Generator[int, object, None]:
    while True:
        try:
            while True:
                yield len(caught)
        except GeneratorExit:
            return
        except BaseException as error:
            caught.append(error)
