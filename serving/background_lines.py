"""Writes logs in a separate thread, so that neither a disk nor the reader of a pipe can fail or delay a request."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable

_MOST_WAITING = 10_000  # lines
_CLOSE_SECONDS = 2.0


class BackgroundLines:
    """A stream of lines. Lines that cannot be written are lost, as are new lines while too many wait.

    Cost: for each line, one entry in a queue.
    """

    def __init__(self, descriptor: int, lost: Callable[[str], None] = lambda why: None) -> None:
        """
        Args:
            descriptor: an open file, to which it writes until `close`.
            lost: called with the reason, in some thread, when lines are lost for the first time.
        """
        self._descriptor, self._lost, self._has_lost = descriptor, lost, False
        self._lines: queue.Queue[str | None] = queue.Queue(_MOST_WAITING)
        self._thread = threading.Thread(target=self._write_all, name="lines", daemon=True)
        self._thread.start()

    def write(self, line: str) -> None:
        """Takes a line with its newline. Neither blocks nor raises."""
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self._lose(f"{_MOST_WAITING} lines wait to be written")

    def flush(self) -> None:
        """Does nothing. Users of streams call it."""

    def close(self) -> None:
        """Writes waiting lines for at most 2 seconds."""
        try:
            self._lines.put(None, timeout=_CLOSE_SECONDS)
        except queue.Full:
            return
        self._thread.join(_CLOSE_SECONDS)

    def _write_all(self) -> None:
        is_broken = False  # whether the file ends in the middle of a line
        while (line := self._lines.get()) is not None:
            data = line.encode(errors="replace")
            rest = memoryview(b"\n" + data if is_broken else data)
            try:
                while rest:
                    rest = rest[os.write(self._descriptor, rest) :]
                is_broken = False
            except OSError as error:
                is_broken = is_broken or len(rest) < len(data)
                self._lose(error.strerror or str(error))

    def _lose(self, why: str) -> None:
        if not self._has_lost:
            self._has_lost = True
            self._lost(why)
