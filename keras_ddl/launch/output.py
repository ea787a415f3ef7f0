"""What the ranks write, on one screen: rank 0 as it comes, whole lines of the others with their rank in front."""

from __future__ import annotations

import functools
import re
import signal
import time
from typing import IO

from keras_ddl.launch import startup_notes
from keras_ddl.launch.repeated_warnings import RepeatedWarnings, Split
from keras_ddl.launch.sinks import LastingSink, Sink
from keras_ddl.launch.startup_notes import NoteFilter, StartupNotes

# A traceback is held back this long. If the rank ends meanwhile, the traceback belongs to its failure and is shown (or
# only summarised) at the end; otherwise the program has caught and logged it, and it is shown in its place.
_HOLD_SECONDS = 3.0
# One that says that another rank is gone is held until that rank must have told why (error_report waits for it, too).
_CONSEQUENCE = re.compile(rb"^(?:[\w.]+: )?(?:keras_ddl\.errors\.)?RankLostError: ", re.MULTILINE)
_HOLD_CONSEQUENCE_SECONDS = 15.0
_HOLD_BYTES = 1 << 18
# On a screen without cursor movement, other ranks' lines wait so long for rank 0 to finish its line.
_UNFINISHED_QUIET_SECONDS = 0.2
_UNFINISHED_SECONDS = 1.0
_LINE_BYTES = 1 << 16
_TAIL_BYTES = 1 << 13
_ERASE_LINE = b"\r\x1b[K"
_HEADER = b"Traceback (most recent call last):"
_TRACEBACK = re.compile(rb"^(?:  \+ Exception Group )?" + re.escape(_HEADER), re.MULTILINE)


class _Surface:
    """One terminal, file or cell: knows the line that rank 0 has not finished."""

    def __init__(self) -> None:
        self.unfinished = b""
        self.rewritten = False  # a progress bar, which may stay unfinished for hours
        self.touched = 0.0
        self.waiting: list[tuple[Sink, bytes]] = []
        self.waiting_since = 0.0

    def track(self, data: bytes) -> None:
        line = (self.unfinished + data).rpartition(b"\n")[2]
        # What a carriage return has overwritten need not be kept.
        head, _, last = line.rpartition(b"\r")
        if not last and head:
            last = head.rpartition(b"\r")[2] + b"\r"
        self.unfinished = last[-_TAIL_BYTES:]
        self.rewritten = b"\r" in line or (self.rewritten and bool(line))
        self.touched = time.monotonic()


class Screen:
    """The launcher's stdout and stderr."""

    def __init__(self, out: Sink, err: Sink, *, shows_notes: bool = True) -> None:
        """`shows_notes`: whether what TensorFlow writes when it is loaded is shown (once)."""
        self.notes = StartupNotes(shown=shows_notes)
        self._sinks = {
            name: LastingSink(sink, functools.partial(self._on_problem, name))
            for name, sink in (("out", out), ("err", err))
        }
        surface = _Surface()
        # Two terminals are taken to be the same one.
        shared = out.terminal and err.terminal
        self._surfaces = {"out": surface, "err": surface if shared else _Surface()}
        self.warnings = RepeatedWarnings(lambda data: self.write_lines("err", data))

    @property
    def lost(self) -> signal.Signals | None:
        """The signal that says why nobody will read any more; None: somebody may."""
        return next((sink.lost for sink in self._sinks.values() if sink.lost is not None), None)

    def _on_problem(self, name: str, error: OSError | ValueError) -> None:
        other = "err" if name == "out" else "out"
        self._sinks[other].write(
            f"keras-ddl: what the ranks write to std{name} is lost, because it cannot be written: {error}\n".encode()
        )

    def write(self, name: str, data: bytes) -> None:
        """Writes output of rank 0 to "out" or "err" as it is."""
        surface = self._surfaces[name]
        self._sinks[name].write(data)
        surface.track(data)
        if not surface.unfinished:
            self._show_waiting(surface)

    def write_lines(self, name: str, data: bytes) -> None:
        """Writes whole lines (ending in a newline) of anything else, without tearing an unfinished line of rank 0."""
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
        """Writes what has waited long enough. Returns whether something still waits."""
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
        """Writes what still waits, and ends unfinished lines, so that what follows begins on a line of its own."""
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
    """What one rank writes: to its log file at once, to the screen in whole lines, tracebacks held back."""

    def __init__(self, rank: int, screen: Screen, log: IO[bytes] | None = None) -> None:
        self._rank, self._screen = rank, screen
        self._log = None if log is None else LastingSink(log, self._on_full_log)
        self._prefix = b"" if rank == 0 else b"[%d] " % rank
        self._notes = NoteFilter(screen.notes)
        self._partial = {"out": b"", "err": b""}
        self._split = Split()
        self._held = b""
        self._held_since = 0.0
        self._line_start = True
        self._stderr_tail = b""

    def feed(self, name: str, data: bytes) -> None:
        """Takes bytes of the rank's "out" or "err"."""
        if self._log is not None:
            self._log.write(data)
        if name == "err":
            self._stderr_tail = (self._stderr_tail + data)[-_TAIL_BYTES:]
            data = self._hold(self._notes.feed(data))
        self._show(name, data)

    def _on_full_log(self, error: OSError | ValueError) -> None:
        self._screen.write_lines("err", f"keras-ddl: rank {self._rank}'s log file is incomplete: {error}\n".encode())

    def tick(self) -> bool:
        """Releases what was held long enough. Returns whether something is still held."""
        self._show("err", self._hold(self._notes.tick()))
        self._show_split(self._split.tick())
        if self._held:
            limit = _HOLD_CONSEQUENCE_SECONDS if _CONSEQUENCE.search(self._held) else _HOLD_SECONDS
            if time.monotonic() - self._held_since > limit:
                self._release()
        return bool(self._held) or self._notes.holds or self._split.holds

    @property
    def traceback_since(self) -> float | None:
        """The time.monotonic() at which the traceback that is held began."""
        return self._held_since if _TRACEBACK.match(self._held) else None

    def end(self, *, failed: bool) -> tuple[str, str]:
        """Writes what is left, unless it is the traceback of a failure. Returns (traceback, last lines of stderr)."""
        traceback = ""
        self._show("err", self._hold(self._notes.flush()))
        if failed and _TRACEBACK.match(self._held):
            traceback, self._held = self._held.decode(errors="replace"), b""
        self._release()
        for name, rest in self._partial.items():
            if rest and self._rank != 0:
                self._show(name, b"\n")
        self._show_split(self._split.flush())
        tail = self._stderr_tail
        if len(tail) == _TAIL_BYTES:  # what is left of its first line may be the end of anything
            tail = tail.partition(b"\n")[2] or tail
        return traceback, startup_notes.without(tail).decode(errors="replace")

    def _hold(self, data: bytes) -> bytes:
        """Returns what may be shown now."""
        if self._held:
            data = self._held + data
            self._held = b""
            since = self._held_since
            self._line_start = True
        else:
            since = time.monotonic()
        for match in _TRACEBACK.finditer(data):
            if (match.start() == 0 and not self._line_start) or len(data) - match.start() > _HOLD_BYTES:
                continue
            self._held, self._held_since = data[match.start() :], since
            return data[: match.start()]
        _, newline, line = data.rpartition(b"\n")
        if line and (newline or self._line_start) and _HEADER.startswith(line):
            self._held, self._held_since = line, since
            return data[: len(data) - len(line)]
        if data:
            self._line_start = data.endswith(b"\n")
        return data

    def _release(self) -> None:
        data, self._held = self._held, b""
        if data:
            self._line_start = data.endswith(b"\n")
            self._show("err", data)

    def _show(self, name: str, data: bytes) -> None:
        if not data:
            return
        if self._rank == 0:
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

    def _show_split(self, found: list[tuple[bool, list[bytes]]]) -> None:
        """Shows stderr of ranks other than 0, warnings once a job."""
        others: list[bytes] = []
        for is_warning, lines in found:
            if self._rank == 0:
                if is_warning:
                    self._screen.warnings.of_rank_0(lines)
            elif is_warning:
                self._screen.warnings.of_other_rank(self._rank, lines)
            else:
                others += lines
        self._show_lines("err", others)

    def _show_lines(self, name: str, lines: list[bytes]) -> None:
        if lines:
            self._screen.write_lines(name, b"".join(self._prefix + _final_state(line) + b"\n" for line in lines))


def _final_state(line: bytes) -> bytes:
    """Returns what a terminal would show of a line that a progress bar has overwritten many times."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]
