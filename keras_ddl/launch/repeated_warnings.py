"""Warnings once a job, not once a rank: what rank 0 has warned of is not shown of the others again.

Warnings are those of Python, of absl and logging, and of TensorFlow's C++ code, on stderr. Rank 0's are shown as they
come. The n-th of one text on another rank waits for the n-th on rank 0, and is then left out; if that does not come, it
is shown with the ranks that have it. So no text is lost, and a rank's own log file holds all of it.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable

# Ranks are seconds apart while they load TensorFlow.
_WAIT_SECONDS = 5.0
# Python writes a warning at once; this long, and for so many lines, the source line that ends it is waited for.
_REST_SECONDS = 0.2
_MESSAGE_LINES = 20
_PYTHON = re.compile(rb"\S.*:\d+: \w*Warning: ")
_ONE_LINE = re.compile(
    rb"WARNING:[\w.]+:|(?P<head>W\d{4} \d\d:\d\d:[\d.]+ +\d+ |\d{4}-\d\d-\d\d \d\d:\d\d:[\d.]+: W )\S+:\d+\] "
)


class Split:
    """Takes lines (without their ends) apart into warnings and others: (is a warning, its lines)."""

    def __init__(self) -> None:
        self._lines: list[bytes] = []  # of a warning that has begun
        self._since = 0.0

    def feed(self, lines: list[bytes]) -> list[tuple[bool, list[bytes]]]:
        """Returns what is complete."""
        found: list[tuple[bool, list[bytes]]] = []
        for line in lines:
            if self._lines and line.startswith(b"  "):  # the source line
                found.append((True, [*self._lines, line]))
                self._lines = []
                continue
            one_line, python = _ONE_LINE.match(line), _PYTHON.match(line)
            if one_line or python or len(self._lines) >= _MESSAGE_LINES:
                found += self.flush()
            if python or self._lines:
                self._lines.append(line)
                self._since = time.monotonic()
            else:
                found.append((one_line is not None, [line]))
        return found

    def tick(self) -> list[tuple[bool, list[bytes]]]:
        """Returns what has waited long enough for its rest."""
        return self.flush() if self._lines and time.monotonic() - self._since > _REST_SECONDS else []

    def flush(self) -> list[tuple[bool, list[bytes]]]:
        """Returns what has begun: a warning of one line, and what follows it."""
        lines, self._lines = self._lines, []
        return [(number == 0, [line]) for number, line in enumerate(lines)]

    @property
    def holds(self) -> bool:
        """Whether something waits for its rest."""
        return bool(self._lines)


def key_of(lines: list[bytes]) -> bytes:
    """Returns what is the same when a warning comes again: all but TensorFlow's time and thread."""
    found = _ONE_LINE.match(lines[0])
    head = len(found["head"]) if found and found["head"] else 0
    return b"\n".join(lines)[head:]


class _Held:
    def __init__(self, lines: list[bytes]) -> None:
        self.lines = lines
        self.ranks: list[int] = []
        self.since = time.monotonic()


class RepeatedWarnings:
    """The warnings of a job. `show` writes whole lines of ranks other than 0 to the screen's stderr."""

    def __init__(self, show: Callable[[bytes], None]) -> None:
        self._show = show
        self._counts: dict[int, Counter[bytes]] = {}
        self._held: dict[tuple[bytes, int], _Held] = {}

    def of_rank_0(self, lines: list[bytes]) -> None:
        """Takes note of what is shown; the same of other ranks is left out."""
        self._held.pop(self._count(0, key_of(lines)), None)

    def of_other_rank(self, rank: int, lines: list[bytes]) -> None:
        """Takes a warning, and shows it later unless rank 0 has it, too."""
        key, number = self._count(rank, key_of(lines))
        if number > self._counts.get(0, Counter())[key]:
            self._held.setdefault((key, number), _Held(lines)).ranks.append(rank)

    def tick(self) -> bool:
        """Shows what has waited long enough. Returns whether something waits."""
        now = time.monotonic()
        self._release([key for key, held in self._held.items() if now - held.since > _WAIT_SECONDS])
        return bool(self._held)

    def flush(self) -> None:
        """Shows all that waits."""
        self._release(list(self._held))

    def _count(self, rank: int, key: bytes) -> tuple[bytes, int]:
        counts = self._counts.setdefault(rank, Counter())
        counts[key] += 1
        return key, counts[key]

    def _release(self, keys: list[tuple[bytes, int]]) -> None:
        for key in keys:
            held = self._held.pop(key)
            prefix = b"[%s] " % b",".join(b"%d" % rank for rank in sorted(held.ranks))
            self._show(b"".join(prefix + line + b"\n" for line in held.lines))
