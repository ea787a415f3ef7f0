"""Shows warnings once per job instead of once per rank: drops other ranks' warnings that rank 0 also has.

Warnings are the lines on stderr of Python's warnings, absl, logging and TensorFlow's C++ code. Rank 0's are shown as
they arrive. The n-th occurrence of a text on another rank waits for the n-th on rank 0, and is then dropped; if rank 0
does not write it, it is shown with the ranks that have it. So no text is lost, and each rank's log file is complete.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable

# Ranks may be seconds apart while they load TensorFlow.
_WAIT_SECONDS = 5.0
# A Python warning ends with a source line. It must arrive within this time and after at most this many lines.
_REST_SECONDS = 0.2
_MESSAGE_LINES = 20
_PYTHON = re.compile(rb"\S.*:\d+: \w*Warning: ")
_SOURCE_LINE = re.compile(rb"  \S")
_ONE_LINE = re.compile(
    rb"WARNING:[\w.]+:|(?P<head>W\d{4} \d\d:\d\d:[\d.]+ +\d+ |\d{4}-\d\d-\d\d \d\d:\d\d:[\d.]+: W )\S+:\d+\] "
)


class Split:
    """Splits lines (without newlines) into warnings and other text: (is a warning, its lines)."""

    def __init__(self, message_lines: int = _MESSAGE_LINES) -> None:
        """`message_lines`: how many lines the message of a Python warning may have before its source line."""
        self._message_lines = message_lines
        self._lines: list[bytes] = []  # the lines of an incomplete warning
        self._since = 0.0

    def feed(self, lines: list[bytes]) -> list[tuple[bool, list[bytes]]]:
        """Takes lines; returns the complete pieces."""
        parts: list[tuple[bool, list[bytes]]] = []
        for line in lines:
            if self._lines and _SOURCE_LINE.match(line):
                parts.append((True, [*self._lines, line]))
                self._lines = []
                continue
            one_line, python = _ONE_LINE.match(line), _PYTHON.match(line)
            if one_line or python or len(self._lines) >= self._message_lines:
                parts += self.flush()
            if python or self._lines:
                self._lines.append(line)
                self._since = time.monotonic()
            else:
                parts.append((one_line is not None, [line]))
        return parts

    def tick(self) -> list[tuple[bool, list[bytes]]]:
        """Returns pieces that have waited long enough to be complete."""
        return self.flush() if self._lines and time.monotonic() - self._since > _REST_SECONDS else []

    def flush(self) -> list[tuple[bool, list[bytes]]]:
        """Returns an incomplete warning as a warning of one line, and then the lines after it."""
        lines, self._lines = self._lines, []
        return [(number == 0, [line]) for number, line in enumerate(lines)]

    @property
    def waiting(self) -> bool:
        return bool(self._lines)


def key_of(lines: list[bytes]) -> bytes:
    """Returns the warning without TensorFlow's time and thread, so that repetitions compare equal."""
    match = _ONE_LINE.match(lines[0])
    head = len(match["head"]) if match and match["head"] else 0
    return b"\n".join(lines)[head:]


def without_python_warnings(text: bytes) -> bytes:
    """Removes warnings of Python, absl and logging from `text`. Keeps text that may be something else."""
    split = Split(message_lines=1)
    parts = [*split.feed(text.split(b"\n")), *split.flush()]
    kept = [line for is_warning, lines in parts if not is_warning or _is_from_tensorflow(lines) for line in lines]
    return b"\n".join(kept)


def _is_from_tensorflow(lines: list[bytes]) -> bool:
    match = _ONE_LINE.match(lines[0])
    return match is not None and match["head"] is not None


class _Waiting:
    def __init__(self, lines: list[bytes]) -> None:
        self.lines = lines
        self.ranks: list[int] = []
        self.since = time.monotonic()


class RepeatedWarnings:
    """The warnings of a job. `show` writes complete lines of ranks other than 0 to the screen's stderr."""

    def __init__(self, show: Callable[[bytes], None]) -> None:
        self._show = show
        self._counts: dict[int, Counter[bytes]] = {}
        self._waiting: dict[tuple[bytes, int], _Waiting] = {}

    def count_rank_0(self, lines: list[bytes]) -> None:
        """Counts a warning that is shown; the same warning of other ranks is dropped."""
        self._waiting.pop(self._count(0, key_of(lines)), None)

    def count_other_rank(self, rank: int, lines: list[bytes]) -> None:
        """Takes a warning of another rank, which is shown later unless rank 0 also has it."""
        key, number = self._count(rank, key_of(lines))
        if number > self._counts.get(0, Counter())[key]:
            self._waiting.setdefault((key, number), _Waiting(lines)).ranks.append(rank)

    def tick(self) -> bool:
        """Shows warnings that have waited long enough. Returns whether some still wait."""
        now = time.monotonic()
        self._release([key for key, waiting in self._waiting.items() if now - waiting.since > _WAIT_SECONDS])
        return bool(self._waiting)

    def flush(self) -> None:
        self._release(list(self._waiting))

    def _count(self, rank: int, key: bytes) -> tuple[bytes, int]:
        counts = self._counts.setdefault(rank, Counter())
        counts[key] += 1
        return key, counts[key]

    def _release(self, keys: list[tuple[bytes, int]]) -> None:
        for key in keys:
            waiting = self._waiting.pop(key)
            prefix = b"[%s] " % b",".join(b"%d" % rank for rank in sorted(waiting.ranks))
            self._show(b"".join(prefix + line + b"\n" for line in waiting.lines))
