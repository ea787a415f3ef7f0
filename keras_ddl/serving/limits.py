"""What requests may become in memory: each by itself, and all that are under way together."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Iterator

from keras_ddl.serving.status import Code, RequestError

MEGABYTE = 2**20
# What Python needs for a string beside its contents, and to remember where a piece of a message is.
_STRING_BYTES, _FIELD_BYTES = 64, 256
# Requests that stay below need no room: their number is bounded by that of connections.
SMALL_BYTES = 64 * 1024
_MUCH_BYTES = 8 * MEGABYTE
_LATER = 10  # calls of `has_leftovers`, after which what was still on its way to a client is gone, too


def give_back_memory() -> None:
    """Returns to the system what Python and the C library keep of what is no longer needed.

    Does nothing where the C library has no such function. Cheap after gc.freeze().
    """
    gc.collect()  # exceptions that went through threads hold their requests in cycles
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class Unpacked:
    """Counts what one request unpacks to, before it is unpacked."""

    def __init__(self, limit: int) -> None:
        """`limit`: bytes of all arrays of the request together."""
        self._limit, self.bytes = limit, 0

    def add(self, size: int) -> None:
        """Raises: RequestError: RESOURCE_EXHAUSTED: with `size` bytes more it were above the limit."""
        self.bytes += size
        if self.bytes > self._limit:
            raise RequestError(
                Code.RESOURCE_EXHAUSTED,
                f"The request is larger than the limit of {self._limit / MEGABYTE:g} MB after it is unpacked: its "
                f"inputs take {self.bytes} bytes or more. Send fewer rows, or start the server with a larger "
                "--max-message-mb.",
            )

    def add_string(self, size: int) -> None:
        """As `add`, for a string of `size` bytes."""
        self.add(size + _STRING_BYTES)

    def add_field(self) -> None:
        """As `add`, for a piece of a message that stands for itself."""
        self.add(_FIELD_BYTES)


class Memory:
    """The bytes that all requests under way may hold. On the event loop only."""

    def __init__(self, limit: int) -> None:
        self.limit, self.used = limit, 0
        self._most = 0  # held at a time since memory was last given back to the system
        self._calls_left = 0  # of `has_leftovers` until memory is given back once more

    def add(self, size: int) -> None:
        self.used += size
        self.note(self.used)

    def note(self, size: int) -> None:
        """Notes that `size` bytes were held, though not by a request that has come: by one that never came whole."""
        self._most = max(self._most, size)

    def has_leftovers(self) -> bool:
        """Whether to give back memory now. To be called at intervals.

        Once when nobody holds anything any more after somebody held much, and once more some calls later: at first
        answers are on their way, which the transport holds.
        """
        if self.used:
            return False
        if self._most >= _MUCH_BYTES:
            self._most, self._calls_left = 0, _LATER
            return True
        self._calls_left = max(0, self._calls_left - 1)
        return self._calls_left == 1

    @contextlib.contextmanager
    def held(self) -> Iterator[Held]:
        """Yields what counts the bytes of one request, which are given back at the end."""
        held = Held(self)
        try:
            yield held
        finally:
            self.used -= held.counted


class Held:
    """The bytes that one request holds."""

    def __init__(self, memory: Memory) -> None:
        self._memory, self.bytes, self.counted = memory, 0, 0

    def add(self, size: int) -> None:
        """Raises: RequestError: UNAVAILABLE: the requests under way hold as much as they may."""
        self.bytes += size
        if self.bytes <= SMALL_BYTES:
            return
        memory, more = self._memory, self.bytes - self.counted
        if memory.used + more > memory.limit:
            raise RequestError(
                Code.UNAVAILABLE,
                f"The requests under way hold {memory.used // MEGABYTE} of {memory.limit // MEGABYTE} MB "
                "(--max-memory-mb). Try again later.",
            )
        memory.add(more)
        self.counted = self.bytes
