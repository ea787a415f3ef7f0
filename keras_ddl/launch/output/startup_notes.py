"""Filters TensorFlow's harmless import messages about the CPU, oneDNN and missing GPUs.

These notes never explain a failure. TF_CPP_MIN_LOG_LEVEL does not hide all of them, because TensorFlow writes some
before it reads that variable. The list is from TensorFlow 2.16 to 2.21. With TF_CPP_MIN_LOG_LEVEL=0 the notes are shown
once per job.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import select
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NoReturn

from keras_ddl import packages

LEVEL = "TF_CPP_MIN_LOG_LEVEL"


def _head(levels: bytes) -> bytes:
    """Matches "I0000 00:00:1795426935.911148    6131 " (absl) or "2026-01-31 12:00:00.1: I ", and a folder."""
    return rb"(?:[%b]\d{4} \d\d:\d\d:[\d.]+ +\d+ |\d{4}-\d\d-\d\d \d\d:\d\d:[\d.]+: [%b] )(?:\S*/)?" % (levels, levels)


_PREFACE = rb"WARNING: All log messages before absl::InitializeLog\(\) is called are written to STDERR"
_CPU = rb"To enable the following instructions: .* rebuild TensorFlow with the appropriate compiler flags\."
_SAID = (
    rb"port\.cc:\d+\] (?:experimental )?oneDNN custom operations are on\.|"
    rb"cpu_feature_guard\.cc:\d+\] This TensorFlow binary is optimized |"
    rb"cudart_stub\.cc:\d+\] Could not find cuda drivers on your machine|"
    rb"computation_placer\.cc:\d+\] computation placer already registered|"
    rb"generator_dataset_op\.cc:\d+\] Memory patch|"
    rb"local_rendezvous\.cc:\d+\] Local rendezvous is aborting with status: OUT_OF_RANGE: End of sequence|"
    rb"\w+\.cc:\d+\] TF-TRT Warning: Could not find"
)
_SAID_AS_ERROR = rb"cuda_\w+\.cc:\d+\] (?:Unable to register |failed call to cuInit)"
_NOTE = re.compile(
    rb"(?:%b(?P<said>(?:%b).*)|%b(?P<error>(?:%b).*)|(?P<plain>%b|%b))\r?"
    % (_head(b"IW"), _SAID, _head(b"IWE"), _SAID_AS_ERROR, _PREFACE, _CPU)
)
_GPU = re.compile(rb"cudart_stub|failed call to cuInit")  # relevant only where TensorFlow should use a GPU
_CUDA = ("/usr/local/cuda", "/dev/nvidiactl")
_INFO = re.compile(_head(b"I"))
_LINE = re.compile(rb"[^\n]*\n|[^\n]+")
# Beginnings of lines that are held back until the rest arrives.
_BEGINNINGS = (
    *(b"I0000 00:00:", b"W0000 00:00:", b"E0000 00:00:", b"0000-00-00 00:00:"),
    *(b"WARNING: All log messages", b"To enable the following"),
)
_ZEROS = bytes.maketrans(b"123456789", b"000000000")
_REST_SECONDS = 1.0


def are_wanted(environ: Mapping[str, str]) -> bool:
    """Whether the user has asked for all of TensorFlow's messages."""
    return environ.get(LEVEL) == "0"


@contextlib.contextmanager
def hidden() -> Iterator[None]:
    """Removes the notes from this process's stderr while the body imports TensorFlow, unless they are wanted.

    All other output passes, even when TensorFlow ends the process: a child process does the filtering, and also copies
    later output of processes that the body started. TF_CPP_MIN_LOG_LEVEL is set to 2 unless it is set already, so that
    only errors are shown afterwards.
    """
    wanted = are_wanted(os.environ)
    os.environ.setdefault(LEVEL, "2")
    if wanted:
        yield
        return
    (source, end), (over, is_over) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        _filter(source, over)
    os.close(source)
    os.close(over)
    stderr = os.dup(2)
    os.dup2(end, 2)
    os.close(end)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        with contextlib.suppress(BrokenPipeError):  # the child was killed
            os.write(is_over, b"x")  # closing is not enough: forked processes have copies
        os.close(is_over)
        os.waitpid(child, 0)


def _filter(source: int, over: int) -> NoReturn:
    """Copies `source` to stderr without the notes, until a byte in `over`; ends the process."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process may still write a message about the interrupt
        _close_others(source, over, 2)
        notes = NoteFilter(StartupNotes(shown=False))
        while ready := select.select([source, over], [], [])[0]:
            if source not in ready:  # and everything that the body wrote has been read
                os.write(2, notes.flush())
                break
            data = os.read(source, 1 << 16)
            os.write(2, notes.feed(data) if data else notes.flush())
            if not data:
                os._exit(0)
        # A separate process copies stderr, because others may keep it open, such as multiprocessing's resource tracker.
        if os.fork() == 0:
            while data := os.read(source, 1 << 16):
                os.write(2, data)
    finally:
        os._exit(0)


def _close_others(*kept: int) -> None:
    """Closes all file descriptors but `kept`, so that this process does not keep pipes open."""
    for each in list(Path("/proc/self/fd").iterdir()):
        if int(each.name) not in kept:
            with contextlib.suppress(OSError):  # the descriptor of the listing itself
                os.close(int(each.name))


def without(text: bytes) -> bytes:
    """Returns the lines of `text` that may be about a failure: without these notes and other INFO lines."""
    return b"".join(line for line in _LINE.findall(text) if not (_key(line) or _INFO.match(line)))


@functools.cache
def _is_for_gpus() -> bool:
    """Whether TensorFlow is built for CUDA and CUDA is installed. True if unknown. Imports nothing."""
    is_for_cuda = packages.is_for_cuda()
    if not is_for_cuda:
        return is_for_cuda is None
    return not packages.missing(["nvidia"]) or any(Path(each).exists() for each in _CUDA)


class StartupNotes:
    """The notes that a job has shown."""

    def __init__(self, *, shown: bool = True) -> None:
        """`shown`: show each note once; otherwise show only notes about GPUs, if TensorFlow is built for GPUs."""
        self._shown = shown
        self._seen: set[bytes] = set()

    def is_new(self, key: bytes) -> bool:
        """Whether to show the note now."""
        new = key not in self._seen and (self._shown or (_GPU.search(key) is not None and _is_for_gpus()))
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
        """Takes bytes of stderr; returns those that may be shown now."""
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
        return bool(self._partial)


def _may_begin_a_note(piece: bytes) -> bool:
    digits_as_zeros = piece.translate(_ZEROS)
    return any(beginning.startswith(digits_as_zeros[: len(beginning)]) for beginning in _BEGINNINGS)


def _key(line: bytes) -> bytes:
    """Returns a note without time and thread, so that repetitions compare equal; b"" for other lines."""
    match = _NOTE.fullmatch(line.rstrip(b"\r\n"))
    return match[match.lastgroup or 0] if match else b""
