"""Shows the ranks' output on one screen: rank 0's as it arrives, others' by the line, with their rank."""

from __future__ import annotations

import functools
import re
import signal
import time
from typing import IO

from keras_ddl.launch.output import startup_notes
from keras_ddl.launch.output.repeated_warnings import RepeatedWarnings, Split, without_python_warnings
from keras_ddl.launch.output.sinks import LastingSink, Sink
from keras_ddl.launch.output.startup_notes import NoteFilter, StartupNotes

# A traceback is delayed this long. If the rank ends meanwhile, the traceback belongs to its failure and is shown (or
# only summarised) at the end; otherwise the program has caught and logged it, and it is shown in place. A
# traceback through the whole program has probably ended it, but shutting down TensorFlow can take seconds.
_TRACEBACK_SECONDS = 3.0
_UNCAUGHT_SECONDS = 10.0
# A RankLostError is delayed until the lost rank must have reported the reason (error_report.py waits for it, too).
_CONSEQUENCE = re.compile(rb"^(?:[\w.]+: )?(?:keras_ddl\.errors\.)?RankLostError: ", re.MULTILINE)
_CONSEQUENCE_SECONDS = 15.0
_TRACEBACK_BYTES = 1 << 18
# On a screen without cursor movement, other ranks' lines wait this long for rank 0 to finish its line.
_UNFINISHED_QUIET_SECONDS = 0.2
_UNFINISHED_SECONDS = 1.0
_LINE_BYTES = 1 << 16
_TAIL_BYTES = 1 << 13
_ERASE_LINE = b"\r\x1b[K"
_HEADER = b"Traceback (most recent call last):"
_TRACEBACK = re.compile(rb"^(?:  \+ Exception Group )?" + re.escape(_HEADER), re.MULTILINE)
_UNCAUGHT = re.compile(_TRACEBACK.pattern + rb"\n  (?:\| )?File \".*\", line \d+, in <module>\n", re.MULTILINE)
# A traceback at the end of the text, with a one-line exception: the end of a longer one cannot be recognized.
_LAST_UNCAUGHT = re.compile(_UNCAUGHT.pattern + rb"(?: .*\n)*(?:\S.*\n?)?\Z", re.MULTILINE)
# A rank's last lines are the ones that it wrote without a pause, shortly before it ended.
_PAUSE_SECONDS = 5.0
_LAST_WORDS_SECONDS = 30.0


class _Surface:
    """One terminal, file or notebook cell, with the line that rank 0 has not finished."""

    def __init__(self) -> None:
        self.unfinished = b""
        self.rewritten = False  # the line is a progress bar, which may stay unfinished for hours
        self.touched = 0.0
        self.waiting: list[tuple[Sink, bytes]] = []
        self.waiting_since = 0.0

    def track(self, data: bytes) -> None:
        line = (self.unfinished + data).rpartition(b"\n")[2]
        # Drop text that a carriage return has overwritten.
        head, _, last = line.rpartition(b"\r")
        if not last and head:
            last = head.rpartition(b"\r")[2] + b"\r"
        self.unfinished = last[-_TAIL_BYTES:]
        self.rewritten = b"\r" in line or (self.rewritten and bool(line))
        self.touched = time.monotonic()


class Screen:
    """The launcher's stdout and stderr."""

    def __init__(self, out: Sink, err: Sink, *, shows_notes: bool = True) -> None:
        """`shows_notes`: whether to show TensorFlow's import messages, once."""
        self.notes = StartupNotes(shown=shows_notes)
        self._sinks = {
            name: LastingSink(sink, functools.partial(self._on_problem, name))
            for name, sink in (("out", out), ("err", err))
        }
        surface = _Surface()
        # If both are terminals, they are assumed to be the same one.
        shared = out.terminal and err.terminal
        self._surfaces = {"out": surface, "err": surface if shared else _Surface()}
        self.warnings = RepeatedWarnings(lambda data: self.write_lines("err", data))

    @property
    def lost(self) -> signal.Signals | None:
        """The signal that stands for the loss of the output's reader (sinks.py); None while it may have one."""
        return next((sink.lost for sink in self._sinks.values() if sink.lost is not None), None)

    def _on_problem(self, name: str, error: OSError | ValueError) -> None:
        other = "err" if name == "out" else "out"
        self._sinks[other].write(
            f"keras-ddl: the ranks' std{name} is lost, because it cannot be written: {error}\n".encode()
        )

    def write(self, name: str, data: bytes) -> None:
        """Writes output of rank 0 to "out" or "err" as it is."""
        surface = self._surfaces[name]
        self._sinks[name].write(data)
        surface.track(data)
        if not surface.unfinished:
            self._show_waiting(surface)

    def write_lines(self, name: str, data: bytes) -> None:
        """Writes complete lines of other ranks or the launcher, without splitting rank 0's unfinished line."""
        surface, sink = self._surfaces[name], self._sinks[name]
        if not surface.unfinished:
            sink.write(data)
        elif sink.terminal:
            sink.write(_ERASE_LINE + data + surface.unfinished)
        else:
            if not surface.waiting:
                surface.waiting_since = time.monotonic()
            surface.waiting.append((sink, data))

    def tick(self) -> bool:
        """Writes text that has waited long enough. Returns whether some text still waits."""
        now = time.monotonic()
        waits = self.warnings.tick()
        for surface in self._surfaces.values():
            if not surface.waiting:
                continue
            if (
                now - surface.touched > _UNFINISHED_QUIET_SECONDS
                or now - surface.waiting_since > _UNFINISHED_SECONDS
                or surface.rewritten
            ):
                self._break_line(surface)
            else:
                waits = True
        return waits

    def finish(self) -> None:
        """Writes all waiting text and ends unfinished lines, so that later output begins on a new line."""
        self.warnings.flush()
        for name, surface in self._surfaces.items():
            if surface.waiting:
                self._break_line(surface)
            elif surface.unfinished and self._sinks[name].terminal:
                self._sinks[name].write(b"\n")
            surface.unfinished = b""

    def _break_line(self, surface: _Surface) -> None:
        surface.waiting[0][0].write(b"\n")
        surface.unfinished = b""
        self._show_waiting(surface)

    def _show_waiting(self, surface: _Surface) -> None:
        for sink, data in surface.waiting:
            sink.write(data)
        surface.waiting.clear()


class RankOutput:
    """One rank's output: to its log file at once, to the screen in complete lines, with tracebacks delayed."""

    def __init__(self, rank: int, screen: Screen, log: IO[bytes] | None = None) -> None:
        self._rank, self._screen = rank, screen
        self._number = rank  # this rank's current number
        self._is_first = rank == 0  # whether output is shown as it arrives
        self._log = None if log is None else LastingSink(log, self._on_full_log)
        self._prefix = b"" if rank == 0 else b"[%d] " % rank
        self._notes = NoteFilter(screen.notes)
        self._partial = {"out": b"", "err": b""}
        self._split = Split()
        self._delayed = b""
        self._delayed_since = 0.0
        self._line_start = True
        self._stderr_tail = b""
        self._stderr_since = 0.0

    def feed(self, name: str, data: bytes) -> None:
        """Takes bytes of the rank's "out" or "err"."""
        if self._log is not None:
            self._log.write(data)
        if name == "err":
            now = time.monotonic()
            tail = self._stderr_tail if now - self._stderr_since < _PAUSE_SECONDS else b""
            self._stderr_tail, self._stderr_since = (tail + data)[-_TAIL_BYTES:], now
            data = self._delay(self._notes.feed(data))
        self._show(name, data)

    def renumber(self, number: int) -> None:
        """Sets the number that `keras_ddl.rank()` returns in this rank from now on.

        The new rank 0 takes over the screen of the lost one. Lines of others start with both numbers, because the
        launcher's own lines keep the first number.
        """
        self._number = number
        if self._is_first:
            return
        if number != 0:
            self._prefix = b"[%d] " % number if number == self._rank else b"[%d, was %d] " % (number, self._rank)
            return
        self._is_first, self._prefix = True, b""
        for name, unfinished in self._partial.items():
            if unfinished:
                self._screen.write(name, unfinished)
        self._partial["out"] = b""

    def _on_full_log(self, error: OSError | ValueError) -> None:
        self._screen.write_lines("err", f"keras-ddl: rank {self._rank}'s log file is incomplete: {error}\n".encode())

    def tick(self) -> bool:
        """Shows output that was delayed long enough. Returns whether some output is still delayed."""
        self._show("err", self._delay(self._notes.tick()))
        self._show_split(self._split.tick())
        if self._delayed:
            limit = _UNCAUGHT_SECONDS if _UNCAUGHT.search(self._delayed) else _TRACEBACK_SECONDS
            limit = _CONSEQUENCE_SECONDS if _CONSEQUENCE.search(self._delayed) else limit
            if time.monotonic() - self._delayed_since > limit:
                self._release()
        return bool(self._delayed) or self._notes.waiting or self._split.waiting

    @property
    def traceback_since(self) -> float | None:
        """When the delayed traceback began (time.monotonic())."""
        return self._delayed_since if _TRACEBACK.match(self._delayed) else None

    def end(self, *, failed: bool, status: int | None = None) -> tuple[str, str]:
        """Writes the rest, unless it is the traceback of a failure. Returns (traceback, last lines of stderr).

        The last lines are recent ones that may explain a failure, so Python's warnings are left out.
        `status`: the exit status, 1 after an uncaught exception; None: unknown.
        """
        traceback = ""
        self._show("err", self._delay(self._notes.flush()))
        if failed and _TRACEBACK.match(self._delayed):
            traceback, self._delayed = self._delayed.decode(errors="replace"), b""
        self._release()
        for name, rest in self._partial.items():
            if rest and not self._is_first:
                self._show(name, b"\n")
        self._show_split(self._split.flush())
        tail = self._stderr_tail if time.monotonic() - self._stderr_since < _LAST_WORDS_SECONDS else b""
        if len(tail) == _TAIL_BYTES:  # its first line is incomplete
            tail = tail.partition(b"\n")[2] or tail
        tail = without_python_warnings(startup_notes.without(tail))
        if failed and status == 1 and not traceback and (uncaught := _LAST_UNCAUGHT.search(tail)):
            traceback = uncaught[0].decode(errors="replace")  # shown in place, because the rank took long to end
        return traceback, tail.decode(errors="replace")

    def _delay(self, data: bytes) -> bytes:
        """Keeps a traceback, or the possible beginning of one, for later; returns the text to show now."""
        if self._delayed:
            data = self._delayed + data
            self._delayed = b""
            since = self._delayed_since
            self._line_start = True
        else:
            since = time.monotonic()
        for match in _TRACEBACK.finditer(data):
            if (match.start() == 0 and not self._line_start) or len(data) - match.start() > _TRACEBACK_BYTES:
                continue
            self._delayed, self._delayed_since = data[match.start() :], since
            return data[: match.start()]
        _, newline, line = data.rpartition(b"\n")
        if line and (newline or self._line_start) and _HEADER.startswith(line):
            self._delayed, self._delayed_since = line, since
            return data[: len(data) - len(line)]
        if data:
            self._line_start = data.endswith(b"\n")
        return data

    def _release(self) -> None:
        data, self._delayed = self._delayed, b""
        if data:
            self._line_start = data.endswith(b"\n")
            self._show("err", data)

    def _show(self, name: str, data: bytes) -> None:
        if not data:
            return
        if self._is_first:
            self._screen.write(name, data)
            if name == "out":
                return
        *lines, rest = (self._partial[name] + data).split(b"\n")
        if len(rest) > _LINE_BYTES:
            lines, rest = [*lines, rest], b""
        self._partial[name] = rest
        if name == "err":
            self._show_split(self._split.feed(lines))
        else:
            self._show_lines(name, lines)

    def _show_split(self, parts: list[tuple[bool, list[bytes]]]) -> None:
        """Shows stderr of ranks other than 0, each warning once per job."""
        others: list[bytes] = []
        for is_warning, lines in parts:
            if self._is_first:
                if is_warning:
                    self._screen.warnings.count_rank_0(lines)
            elif is_warning:
                self._screen.warnings.count_other_rank(self._number, lines)
            else:
                others += lines
        self._show_lines("err", others)

    def _show_lines(self, name: str, lines: list[bytes]) -> None:
        if lines:
            self._screen.write_lines(name, b"".join(self._prefix + _final_state(line) + b"\n" for line in lines))


def _final_state(line: bytes) -> bytes:
    """Returns what a terminal would show of a line that a progress bar has rewritten."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]
