"""Pseudo-terminals for rank 0, and the size of the launcher's terminal."""

from __future__ import annotations

import os
import termios


def size(fd: int) -> tuple[int, int]:
    """Returns (rows, columns) of the terminal `fd`, or (24, 80) if unknown."""
    try:
        rows, columns = termios.tcgetwinsize(fd)
    except termios.error:
        rows = columns = 0
    return (rows, columns) if rows > 0 and columns > 0 else (24, 80)


def set_size(fd: int, rows: int, columns: int) -> None:
    termios.tcsetwinsize(fd, (rows, columns))


def open_pair(rows: int, columns: int) -> tuple[int, int]:
    """Returns the two ends of a pseudo-terminal: ours and the program's. Bytes pass through it unchanged."""
    ours, theirs = os.openpty()
    attributes = termios.tcgetattr(theirs)
    attributes[1] &= ~termios.OPOST  # the launcher's own terminal turns \n into \r\n
    attributes[3] &= ~termios.ECHO
    termios.tcsetattr(theirs, termios.TCSANOW, attributes)
    set_size(ours, rows, columns)
    return ours, theirs
