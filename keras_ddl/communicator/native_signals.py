"""Signals such as Ctrl-C that come while the main thread carries a collective out in the native library."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Generator

INTERRUPTED = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)


class Interruption:
    """What the native library calls in a long collective, so that Python runs the handlers of signals that have come.

    An exception that a handler raises (KeyboardInterrupt) must not leave the function that C calls: ctypes would print
    and forget it. It is kept for `reraise`. A plain function would not do: it is interrupted before its first line,
    where no `try` of its own reaches. A generator that waits inside a `try` goes on inside it.

    One thread at a time may be in the native library with it. Outside the main thread, Python runs no handlers.
    """

    def __init__(self) -> None:
        self._caught: list[BaseException] = []
        steps = _run_handlers(self._caught)
        next(steps)
        self.function = INTERRUPTED(steps.send)

    def reraise(self) -> None:
        """Raises what a handler has raised since the last call, if any, in the main thread, where handlers run."""
        if self._caught and threading.current_thread() is threading.main_thread():
            error = self._caught[0]
            self._caught.clear()
            raise error


def _run_handlers(caught: list[BaseException]) -> Generator[int, None, None]:
    while True:
        try:
            while True:
                yield len(caught)
        except GeneratorExit:
            return
        except BaseException as error:
            caught.append(error)
