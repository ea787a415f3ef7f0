"""Destinations of the launcher's output, which must not fail when nobody reads it any more.

Whatever happens to the launcher's output, the ranks must end as in any job, and all temporary files must be removed. So
no sink of a job raises. When the reader's end of a pipe is closed, as by `| head`, the job ends with the status of
SIGPIPE. When the terminal is gone, it ends with the status of SIGHUP, unless SIGHUP is ignored, as by nohup. On other
errors, such as a full disk, the output is lost, and a message goes to the other stream.
"""

from __future__ import annotations

import codecs
import errno
import os
import signal
import time
from collections.abc import Callable
from typing import IO, Protocol, TextIO

_LOST_TERMINAL_ERRORS = (errno.EIO, errno.ENXIO, errno.ENODEV)


class Sink(Protocol):
    """A destination for bytes. `terminal`: whether it has a cursor that can be moved."""

    terminal: bool

    def write(self, data: bytes) -> None: ...


class FileDescriptorSink:
    """Writes to a file descriptor of this process."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.terminal = os.isatty(fd)

    def write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._fd, view) :]
            except BlockingIOError:  # somebody has made our terminal non-blocking
                time.sleep(0.01)


class TextSink:
    """Writes to a Python text stream, such as the output of a notebook's cell."""

    terminal = False

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def write(self, data: bytes) -> None:
        self._stream.write(self._decoder.decode(data))
        self._stream.flush()


class LastingSink:
    """Writes to a sink until that fails; never raises.

    Attributes:
        lost: the signal that stands for the loss of the reader, None while there may be one.
    """

    def __init__(
        self, sink: Sink | IO[bytes], on_problem: Callable[[OSError | ValueError], None] = lambda error: None
    ) -> None:
        """`on_problem` is called at the first error that does not end the job."""
        self._sink, self._on_problem = sink, on_problem
        self.terminal = getattr(sink, "terminal", False)
        self.lost: signal.Signals | None = None
        self._had_problem = False

    def write(self, data: bytes) -> None:
        if self.lost is not None:
            return
        try:
            self._sink.write(data)
        except BrokenPipeError:
            self.lost = signal.SIGPIPE
        except (OSError, ValueError) as error:  # ValueError: a text stream was closed
            hung_up = self.terminal and getattr(error, "errno", None) in _LOST_TERMINAL_ERRORS
            if hung_up and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
                self.lost = signal.SIGHUP
            elif not self._had_problem:
                self._had_problem = True
                self._on_problem(error)


def open_standard_streams() -> None:
    """Opens /dev/null as stdin, stdout or stderr if this process was started without.

    Otherwise the next opened file would take their descriptor.
    """
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is the missing one
            os.set_inheritable(fd, True)
