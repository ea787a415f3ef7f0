"""A collective that runs in the background."""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

from keras_ddl.communicator.native.native_library import Request, core
from keras_ddl.communicator.reporting.idleness import waits_for_collectives
from keras_ddl.errors import KerasDdlError

# Long enough to cost nothing, short enough for Ctrl-C to feel immediate: signals are handled between two slices.
WAIT_SLICE_MS = 100


class Rows:
    """Bytes that a collective has received; an array made from them keeps them alive."""

    def __init__(self, started: Started, address: int | None, length: int) -> None:
        self._started = started
        data = {"data": (address, True)} if length and address is not None else {"data": b""}
        self.__array_interface__ = {"shape": (length,), "typestr": "|u1", "version": 3, **data}


class Started:
    """A collective that the communication thread runs. It is kept alive, with the memory it uses, until it is done."""

    _all: ClassVar[set[Started]] = set()

    def __init__(self, work: int, request: Request, keep: Any, error_of: Callable[[int], KerasDdlError | None]) -> None:
        self._work = work
        self._error_of = error_of
        self._request = request  # keeps alive the memory that it points to
        self._keep = keep
        self._all.add(self)
        for each in [each for each in tuple(self._all) if each.is_done()]:
            self._all.discard(each)

    def is_done(self) -> bool:
        """Whether it has ended, successfully or not."""
        return self.wait(0)

    @waits_for_collectives
    def wait(self, seconds: float | None = None) -> bool:
        """Waits at most `seconds` until it has ended; returns whether it has. Handles signals while it waits."""
        end = math.inf if seconds is None else time.monotonic() + seconds
        while True:
            left_ms = math.ceil(min(WAIT_SLICE_MS, 1e3 * max(0.0, end - time.monotonic())))
            if core().ddl_work_wait(self._work, left_ms):
                self._all.discard(self)
                return True
            if time.monotonic() >= end:
                return False

    def error(self) -> KerasDdlError | None:
        """Returns its error, or None if it succeeded. REQUIRES: it has ended."""
        return self._error_of(self._work)

    def rows(self, ranks: int) -> list[int]:
        """Returns the number of rows from each rank. REQUIRES: it has ended, and has no `place`."""
        rows: list[int] = core().ddl_work_rows(self._work)[:ranks]
        return rows

    def copy_to(self, places: Iterable[tuple[int, int]]) -> None:
        """Copies the rows one after another to `places`, a list of (address, number of bytes)."""
        source = core().ddl_work_data(self._work)
        for address, length in places:
            ctypes.memmove(address, source, length)
            source += length

    def in_place(self, length: int) -> Rows:
        """Returns the rows, `length` bytes in total, for numpy.asarray, which does not copy them."""
        return Rows(self, core().ddl_work_data(self._work), length)

    def __del__(self) -> None:
        core().ddl_work_free(self._work)
