"""Tracks the requests in progress and the memory that they use in the server's own process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from keras_ddl.serving.processes import memory
from keras_ddl.serving.processes.memory import MEGABYTE
from keras_ddl.serving.protocol.status import Code, RequestError

_SMALL_BYTES = 2**16  # smaller requests are not counted, because their number is limited
_STALLED_SECONDS = 2.0  # a request that moved no byte for this long may be dropped for others
_MOST = 4096  # requests in progress
_MOST_UNREAD = 1000  # requests with only their headers
_LOOK_SECONDS = 0.03
_YOUNG_SECONDS = 0.1  # how long a small message may take on a busy machine


class Flight:
    """A request in progress. `drop` ends it and releases its memory.

    Attributes:
        deadline: latest time for its answer, by the event loop's clock.
        peer: gRPC's name of the client; "": the request did not come over gRPC.
    """

    def __init__(self, flights: Flights, drop: Callable[[], None], deadline: float) -> None:
        self._flights, self.drop, self.deadline = flights, drop, deadline
        self.size = self.counted = 0
        self.is_dropped = False
        self.peer = ""
        self.moved_at: float | None = time.monotonic()  # None while it is computed
        self._timer: asyncio.TimerHandle | None = None

    def hold(self, size: int) -> None:
        """Sets the bytes that the request uses now. Raises: RequestError: UNAVAILABLE: the limit is reached."""
        self.moved_at = time.monotonic()
        self.size = 0 if size <= _SMALL_BYTES else size
        self._flights._count(self)

    def compute(self) -> None:
        """Marks the request as waiting for a model, not for its client."""
        self.moved_at = None

    def drop_after(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self.drop)

    def ended(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


class Flights:
    """All requests in progress. On the event loop only.

    The server counts the bytes of its own bodies and responses. gRPC does not report its memory for incomplete
    messages, so `watch` reads the memory of this process, and drops the oldest requests while it is above the limit.
    """

    def __init__(self, limit: int, timeout: float) -> None:
        """
        Args:
            limit: bytes for requests in this process: half for counted bytes, half for gRPC's.
            timeout: seconds from the beginning of a request to its answer.
        """
        self._limit, self._used, self._timeout = limit // 2, 0, timeout
        self._all: dict[Flight, None] = {}  # oldest first
        self._unread: dict[Flight, None] = {}
        self._first = memory.resident_bytes()

    def begin(self, drop: Callable[[], None]) -> Flight:
        """Adds a request. `drop`: ends it. Raises: RequestError: RESOURCE_EXHAUSTED: too many requests."""
        if len(self._all) >= _MOST:
            raise RequestError(Code.RESOURCE_EXHAUSTED, f"{_MOST} requests are in progress. Try again later.")
        flight = Flight(self, drop, asyncio.get_running_loop().time() + self._timeout)
        self._all[flight] = None
        return flight

    def peers(self) -> set[str]:
        """Returns the gRPC clients whose requests have arrived and are in progress."""
        return {flight.peer for flight in self._all if flight.peer and flight not in self._unread}

    def end(self, flight: Flight) -> None:
        self._all.pop(flight, None)
        self.message_received(flight)
        self._used -= flight.counted
        flight.counted = 0
        flight.ended()

    def await_message(self, flight: Flight) -> None:
        """Marks a request as waiting for a gRPC message. If too many wait for one, the oldest is dropped."""
        self._unread[flight] = None
        if len(self._unread) > _MOST_UNREAD:
            self._drop(next(iter(self._unread)))

    def message_received(self, flight: Flight) -> None:
        self._unread.pop(flight, None)

    def _count(self, flight: Flight) -> None:
        more = flight.size - flight.counted
        if self._used + more > self._limit and more > 0:
            now = time.monotonic()
            for each in list(self._all):
                waits = each is not flight and each.counted and each.moved_at is not None
                if waits and now - (each.moved_at or now) > _STALLED_SECONDS:
                    self._drop(each)
                if self._used + more <= self._limit:
                    break
            else:
                raise RequestError(
                    Code.UNAVAILABLE,
                    f"The requests in progress use {self._used // MEGABYTE} of {self._limit // MEGABYTE} MB (half of "
                    "--max-memory-mb). Try again later.",
                )
        self._used += more
        flight.counted = flight.size

    def _drop(self, flight: Flight) -> None:
        flight.is_dropped = True
        self.end(flight)
        flight.drop()

    async def watch(self) -> None:
        """Polls this process's memory, and keeps it below the limit."""
        looks = 0
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            looks += 1
            if self._uncounted() > self._limit:
                await asyncio.to_thread(memory.collect)
                before = time.monotonic() - _YOUNG_SECONDS
                old = [each for each in self._unread if each.moved_at is not None and each.moved_at < before]
                if self._uncounted() > self._limit:
                    for flight in old[: len(old) // 2 + 1]:
                        self._drop(flight)
            elif not self._used and self._uncounted() > self._limit // 4 and looks % 30 == 0:
                await asyncio.to_thread(memory.collect)

    def _uncounted(self) -> int:
        return memory.resident_bytes() - self._first - self._used
