"""The requests that are under way, and what they hold of the server's own memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from keras_ddl.serving import memory
from keras_ddl.serving.memory import MEGABYTE
from keras_ddl.serving.status import Code, RequestError

_SMALL_BYTES = 2**16  # requests that stay below need no room: their number is bounded
_STALLED_SECONDS = 2.0  # without a byte in either direction, after which a request gives way to others
_MOST = 4096  # requests under way
_MOST_UNREAD = 1000  # of which nothing has come but their headers
_LOOK_SECONDS = 0.03
_YOUNG_SECONDS = 0.1  # which a small message needs to come on a busy machine


class Flight:
    """A request under way. `drop`: ends it, and whoever holds something for it lets that go."""

    def __init__(self, flights: Flights, drop: Callable[[], None]) -> None:
        self._flights, self.drop = flights, drop
        self.size = self.counted = 0
        self.is_dropped = False
        self.moved_at: float | None = time.monotonic()  # None while it is computed
        self._timer: asyncio.TimerHandle | None = None

    def hold(self, size: int) -> None:
        """Says that it holds `size` bytes now. Raises: RequestError: UNAVAILABLE: others hold as much as they may."""
        self.moved_at = time.monotonic()
        self.size = 0 if size <= _SMALL_BYTES else size
        self._flights._count(self)

    def compute(self) -> None:
        """Says that it waits for a model from now on, and not for its client."""
        self.moved_at = None

    def ends_within(self, seconds: float) -> None:
        """Drops it when it has not ended by then."""
        self._timer = asyncio.get_running_loop().call_later(seconds, self.drop)

    def ended(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


class Flights:
    """All requests under way. On the event loop only.

    Bytes that the server holds itself are counted: bodies, answers. What gRPC holds of messages that have not come
    whole it tells nobody: there the memory of this process is looked at, and the oldest of such messages are dropped
    while it is above the limit.
    """

    def __init__(self, limit: int) -> None:
        """`limit`: bytes that requests may hold in this process: a half those that are counted, a half the others."""
        self._limit, self._used = limit // 2, 0
        self._all: dict[Flight, None] = {}  # in the order in which they began
        self._unread: dict[Flight, None] = {}
        self._first = memory.resident_bytes()

    def begin(self, drop: Callable[[], None]) -> Flight:
        """Args: drop: ends the request. Raises: RequestError: RESOURCE_EXHAUSTED: there are too many."""
        if len(self._all) >= _MOST:
            raise RequestError(Code.RESOURCE_EXHAUSTED, f"{_MOST} requests are under way. Try again later.")
        flight = Flight(self, drop)
        self._all[flight] = None
        return flight

    def end(self, flight: Flight) -> None:
        self._all.pop(flight, None)
        self.has_come(flight)
        self._used -= flight.counted
        flight.counted = 0
        flight.ended()

    def awaits_message(self, flight: Flight) -> None:
        """Notes that a message over gRPC is to come. The oldest such request gives way if there are many."""
        self._unread[flight] = None
        if len(self._unread) > _MOST_UNREAD:
            self._drop(next(iter(self._unread)))

    def has_come(self, flight: Flight) -> None:
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
                    f"The requests under way hold {self._used // MEGABYTE} of {self._limit // MEGABYTE} MB "
                    "(half of --max-memory-mb). Try again later.",
                )
        self._used += more
        flight.counted = flight.size

    def _drop(self, flight: Flight) -> None:
        flight.is_dropped = True
        self.end(flight)
        flight.drop()

    async def look(self) -> None:
        """Looks at this process's memory from time to time, and keeps it below the limit."""
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
