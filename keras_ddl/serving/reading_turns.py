"""Messages over gRPC come in a few at a time: gRPC holds each whole, more than once, before anybody can count it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from keras_ddl.serving.limits import Memory
from keras_ddl.serving.status import Code, RequestError

_COPIES = 3  # of a message, that gRPC holds while it reads it
_PATIENT_SECONDS = 2.0


class ReadingTurns:
    """Up to `count` turns at a time. On the event loop only.

    What has no turn yet stays with its client: HTTP/2 lets no more than a window of it through. Who takes long over a
    turn loses it when others wait.
    """

    def __init__(self, count: int, seconds: float, patient_seconds: float = _PATIENT_SECONDS) -> None:
        """
        Args:
            seconds: that a turn and the wait for it may take together.
            patient_seconds: that a turn may take when others wait.
        """
        self._free, self._waiting = asyncio.Semaphore(count), 0
        self._seconds, self._patient_seconds = seconds, patient_seconds
        self._running: dict[asyncio.Timeout, float] = {}  # -> when it began

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Raises: RequestError: DEADLINE_EXCEEDED: what is done in the turn, or the wait for it, took too long."""
        now = asyncio.get_running_loop().time
        begin = now()
        try:
            async with asyncio.timeout(self._seconds) as timeout:
                await self._take()
                self._running[timeout] = now()
                self._hurry()
                try:
                    yield
                finally:
                    del self._running[timeout]
                    self._free.release()
        except TimeoutError:
            allowed = timeout.when() - begin  # less than it was, if _hurry has shortened it
            others = ", and others wait" if allowed < self._seconds else ""
            seconds = min(allowed, self._seconds)
            raise RequestError(
                Code.DEADLINE_EXCEEDED, f"The request did not come within {seconds:.3g} s{others}."
            ) from None

    async def _take(self) -> None:
        self._waiting += 1
        try:
            if self._free.locked():
                self._hurry()
            await self._free.acquire()
        finally:
            self._waiting -= 1

    def _hurry(self) -> None:
        """Shortens the turns that are taken, if others wait."""
        for timeout, begin in self._running.items() if self._waiting else ():
            when = begin + self._patient_seconds
            if not timeout.expired() and timeout.when() > when:
                timeout.reschedule(when)


def turns_and_memory(memory_bytes: int, message_bytes: int, seconds: float) -> tuple[ReadingTurns, Memory]:
    """Divides what all requests may hold: up to half of it is for messages that come in over gRPC.

    Args:
        memory_bytes: of all requests under way. One message is read at a time, whatever it takes.
        message_bytes: of a message at the most.
        seconds: in which a message must have come.
    """
    count = max(1, memory_bytes // (2 * _COPIES * message_bytes))
    return ReadingTurns(count, seconds), Memory(memory_bytes - min(memory_bytes // 2, count * _COPIES * message_bytes))
