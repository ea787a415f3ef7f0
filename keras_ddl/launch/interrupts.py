"""Collects signals to the launcher or a wrapper while a job runs; they wake its loop, which handles them."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterable
from types import FrameType, TracebackType
from typing import Any


class Interrupts:
    """Context manager that collects signals; restores the previous handlers at the end.

    Python runs signal handlers in the main thread only, so in another thread this does nothing. A signal that was
    ignored (in a job started with nohup, or in the background of a script) stays ignored.
    """

    def __init__(self, signals: Iterable[signal.Signals], again: Callable[[], None]) -> None:
        """`again`: called on every SIGINT after the first, by the handler itself, because the loop may be stuck."""
        self.received: list[int] = []
        self._signals = tuple(signals)
        self._again = again
        self._previous: dict[int, Any] = {}
        self._reader, self._writer = -1, -1
        self._previous_wakeup: int | None = None
        self._num_interrupts = 0

    def fileno(self) -> int:
        return self._reader

    def __enter__(self) -> Interrupts:
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        if threading.current_thread() is threading.main_thread():
            self._previous_wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
            for signum in self._signals:
                if signal.getsignal(signum) is not signal.SIG_IGN:
                    self._previous[signum] = signal.signal(signum, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        for signum, handler in self._previous.items():
            # None: code other than Python's installed the handler, so it cannot be restored.
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)
        if self._previous_wakeup is not None:
            signal.set_wakeup_fd(self._previous_wakeup)
        os.close(self._reader)
        os.close(self._writer)

    def take(self) -> list[int]:
        """Returns the signals that arrived since the last call."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._reader, 4096)
        received, self.received = self.received, []
        return received

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self.received.append(signum)
        if signum == signal.SIGINT:
            self._num_interrupts += 1
            if self._num_interrupts > 1:
                self._again()
