"""Filters TensorFlow's messages at its import about the CPU, oneDNN and missing GPUs: once per job is enough.

They are never why a rank failed. TF_CPP_MIN_LOG_LEVEL does not help: some are written before TensorFlow reads it. Taken
from TensorFlow 2.16 to 2.21.
"""

from __future__ import annotations

import re
import time

# absl's "I0000 00:00:1795426935.911148    6131 port.cc:153] ", or "2026-01-31 12:00:00.1: I tensorflow/x.cc:12] "
_HEAD = rb"(?:([IWEF])\d{4} \d\d:\d\d:[\d.]+ +\d+ |\d{4}-\d\d-\d\d \d\d:\d\d:[\d.]+: ([IWEF]) )"
_PREFACE = rb"WARNING: All log messages before absl::InitializeLog\(\) is called are written to STDERR"
_CPU = rb"To enable the following instructions: .* rebuild TensorFlow with the appropriate compiler flags\."
# By file, and by text if the file has other messages.
_SAID = (
    rb"(?:port|cpu_feature_guard|cudart_stub|computation_placer)\.cc:\d+\]|generator_dataset_op\.cc:\d+\] Memory patch|"
    rb"cuda_\w+\.cc:\d+\] (?:Unable to register|failed call to cuInit)|\.cc:\d+\] TF-TRT Warning: Could not find"
)
_NOTE = re.compile(
    rb"(?:" + _HEAD + rb"\S*?(?P<said>(?:" + _SAID + rb").*)|(?P<plain>" + _PREFACE + rb"|" + _CPU + rb"))\r?"
)
_INFO = re.compile(_HEAD.replace(b"[IWEF]", b"I"))
_LINE = re.compile(rb"[^\n]*\n|[^\n]+")
# Beginnings of lines whose rest is waited for.
_BEGINNINGS = (
    *(b"I0000 00:00:", b"W0000 00:00:", b"E0000 00:00:", b"F0000 00:00:", b"0000-00-00 00:00:"),
    *(b"WARNING: All log messages", b"To enable the following"),
)
_ZEROS = bytes.maketrans(b"123456789", b"000000000")
_REST_SECONDS = 1.0


def without(text: bytes) -> bytes:
    """Returns the lines of `text` that may be about a failure: neither such notes nor other INFO lines."""
    return b"".join(line for line in _LINE.findall(text) if not (_key(line) or _INFO.match(line)))


class StartupNotes:
    """The notes that a job has shown."""

    def __init__(self, *, shown: bool = True) -> None:
        """`shown`: whether each is shown once; otherwise none is shown."""
        self._shown = shown
        self._seen: set[bytes] = set()

    def is_new(self, key: bytes) -> bool:
        """Whether the note is to be shown now."""
        new = self._shown and key not in self._seen
        self._seen.add(key)
        return new


class NoteFilter:
    """Removes notes that the job has already shown from one rank's stderr, which arrives in pieces."""

    def __init__(self, notes: StartupNotes) -> None:
        self._notes = notes
        self._partial = b""  # a line that may become a note
        self._partial_since = 0.0
        self._line_start = True

    def feed(self, data: bytes) -> bytes:
        """Returns what may be shown now."""
        data, self._partial = self._partial + data, b""
        shown = []
        for line in _LINE.findall(data):
            complete = line.endswith(b"\n")
            if self._line_start and not complete and _may_begin_a_note(line):
                self._partial, self._partial_since = line, time.monotonic()
                break
            key = _key(line) if self._line_start and complete else b""
            if not key or self._notes.is_new(key):
                shown.append(line)
            self._line_start = complete
        return b"".join(shown)

    def tick(self) -> bytes:
        """Returns a partial line that has waited too long for its rest."""
        return self.flush() if self._partial and time.monotonic() - self._partial_since > _REST_SECONDS else b""

    def flush(self) -> bytes:
        """Returns the partial line."""
        data, self._partial = self._partial, b""
        self._line_start = self._line_start and not data
        return data

    @property
    def waiting(self) -> bool:
        """Whether a partial line waits for its rest."""
        return bool(self._partial)


def _may_begin_a_note(piece: bytes) -> bool:
    digits_as_zeros = piece.translate(_ZEROS)
    return any(beginning.startswith(digits_as_zeros[: len(beginning)]) for beginning in _BEGINNINGS)


def _key(line: bytes) -> bytes:
    """Returns a note without time and thread, so that repetitions are equal; b"" for other lines."""
    match = _NOTE.fullmatch(line.rstrip(b"\r\n"))
    return (match["said"] or match["plain"]) if match else b""
