"""The launcher's stdin, for rank 0."""

from __future__ import annotations

import os
import sys

from keras_ddl.launch.rank_link import RankLink
from keras_ddl.link.kinds import Kind

_WINDOW_BYTES = 1 << 16


class StdinForwarder:
    """Forwards stdin to rank 0. It reads no more than rank 0 has room for, so unread input takes no memory."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd
        self._outstanding = 0
        self._is_terminal = fd is not None and os.isatty(fd)
        self._ended = False

    @property
    def wanted(self) -> bool:
        return self._fd is not None

    def fileno(self) -> int:
        return -1 if self._fd is None else self._fd

    def readable(self) -> bool:
        """Whether reading is useful and allowed now."""
        if self._fd is None or self._ended or self._outstanding >= _WINDOW_BYTES:
            return False
        if not self._is_terminal:
            return True
        try:
            # In the background, reading from the terminal would stop the launcher (SIGTTIN).
            return os.tcgetpgrp(self._fd) == os.getpgrp()
        except OSError:  # not our controlling terminal, so reading cannot stop us
            return True

    def forward(self, link: RankLink) -> None:
        """Sends rank 0 the input that can be read, and an empty frame at its end."""
        assert self._fd is not None
        try:
            data = os.read(self._fd, _WINDOW_BYTES - self._outstanding)
        except OSError:
            data = b""
        self._ended = not data
        self._outstanding += len(data)
        link.send(Kind.STDIN, data)

    def taken(self, num_bytes: int) -> None:
        """Records that rank 0 has read or dropped this number of bytes."""
        self._outstanding -= num_bytes


def stdin_fd() -> int | None:
    """Returns the file descriptor of this process's stdin, or None."""
    try:
        fd = sys.__stdin__.fileno()  # type: ignore[union-attr]
        os.fstat(fd)
    except (AttributeError, OSError, ValueError):
        return None
    return fd
