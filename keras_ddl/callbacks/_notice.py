"""Signals that announce the end of a job (Slurm's, a spot instance's), received by one rank and agreed on by all."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any

from keras_ddl import communicator
from keras_ddl.data import notice
from keras_ddl.errors import ConfigError

_NEVER = {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL}
# A signal that arrives again after this time is handled as it was before `begin`.
_AGAIN_SECONDS = 30.0


class Notice:
    """The signals that Checkpoint listens to while a model trains."""

    def __init__(self, names: str | Sequence[str]) -> None:
        """Raises: ConfigError: an unknown signal, or one that a program cannot catch."""
        self.signals = tuple(_number(name) for name in ([names] if isinstance(names, str) else names))
        self._previous: dict[signal.Signals, Any] = {}
        self._received: int = 0
        self._received_at = 0.0
        self._announced = False

    def __bool__(self) -> bool:
        return bool(self.signals)

    def begin(self) -> None:
        """Installs the handlers. Raises: ConfigError: not in the main thread, where Python handles signals."""
        if not self.signals:
            return
        self.end()
        if threading.current_thread() is not threading.main_thread():
            raise ConfigError(
                "on_signal needs a fit in the main thread, because Python handles signals there. Received: a fit in "
                f"thread {threading.current_thread().name!r}. Call fit in the main thread, or leave out on_signal."
            )
        self._received, self._announced = 0, False
        notice.forget()
        self._previous = {number: signal.signal(number, self._handle) for number in self.signals}

    def end(self) -> None:
        """Restores the previous handlers."""
        previous, self._previous = self._previous, {}
        with contextlib.suppress(ValueError):  # another thread
            for number, handler in previous.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # The handler only records the signal, because it may interrupt any code.
        now = time.monotonic()
        if not self._received:
            self._received, self._received_at = number, now
        elif now - self._received_at > _AGAIN_SECONDS:  # the first one had no effect: the fit has failed, or hangs
            self.end()
            signal.raise_signal(number)

    def announce(self) -> None:
        """Before a step: adds this rank's signal to the step's exchange."""
        if self._received and not self._announced:
            self._announced = True
            notice.announce(self._received, communicator.rank() if communicator.is_initialized() else 0)

    def agreed(self) -> tuple[str, int] | None:
        """After a step: (name of the signal, rank that received it), equal on all ranks. Not collective."""
        if not self.signals:
            return None
        return _named(*(notice.agreed() if _size() > 1 else (self._received, 0)))

    def agree(self) -> tuple[str, int] | None:
        """Like `agreed`, but outside of steps and with a separate exchange. COLLECTIVE."""
        if not self.signals:
            return None
        received = [self._received]
        if _size() > 1:
            received = communicator.all_gather_object(self._received, name="Checkpoint/notice")
        return next((_named(number, rank) for rank, number in enumerate(received) if number), None)


def _size() -> int:
    return communicator.size() if communicator.is_initialized() else 1


def _named(number: int, rank: int) -> tuple[str, int] | None:
    return (signal.Signals(number).name, rank) if number else None


def _number(name: str) -> signal.Signals:
    number = getattr(signal.Signals, name, None) if isinstance(name, str) else None
    if number is None or number in _NEVER:
        raise ConfigError(
            f"on_signal must be names of signals that announce the end of a job. Received: {name!r}. Use for example "
            "'SIGTERM', 'SIGUSR1' or 'SIGUSR2'."
        )
    return number
