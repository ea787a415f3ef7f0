"""Connections between the processes of a job: on one host by UNIX sockets, between hosts by TCP."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Generic, TypeVar

T = TypeVar("T")


def listen_here(path: Path) -> socket.socket:
    """Opens a UNIX socket that does not block, in a directory that only the user can enter. Raises: OSError."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with _short_path(path) as name:
        sock.bind(name)
    sock.listen(1024)
    sock.setblocking(False)
    return sock


def connect_here(path: Path) -> socket.socket:
    """Connects to the UNIX socket at `path`. Raises: OSError: nobody listens there."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _short_path(path) as name:
            sock.connect(name)
    except BaseException:
        sock.close()
        raise
    return sock


@contextlib.contextmanager
def _short_path(path: Path) -> Iterator[str]:
    """Yields a short path to the socket, through its directory's descriptor.

    Names of UNIX sockets have at most 107 bytes, and TMPDIR may be longer.
    """
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)


def keep_alive(connection: socket.socket, seconds: float) -> None:
    """Makes a TCP connection fail when the other host has not answered for about `seconds` seconds.

    A host that vanishes sends nothing, and by default TCP waits hours for it.
    """
    probe = max(1, round(seconds / 4))
    for level, option, value in (
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, probe),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, probe),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * seconds)),
    ):
        connection.setsockopt(level, option, value)


class Unproven(Generic[T]):
    """Connections, by descriptor, that have not yet proved that they belong to this job.

    Their number is limited. When there are too many, the address with the most connections loses its oldest one. So an
    address that floods a port shuts out only itself, and its oldest connections, which should have proved themselves
    long ago, go first.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._all: dict[int, tuple[str, T]] = {}
        self._by_address: dict[str, dict[int, None]] = {}  # the oldest first

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[int]:
        """Iterates over the descriptors, the oldest first."""
        return iter(list(self._all))

    def __contains__(self, fd: int) -> bool:
        return fd in self._all

    def __getitem__(self, fd: int) -> T:
        return self._all[fd][1]

    def add(self, fd: int, address: str, one: T) -> T | None:
        """Adds a connection; returns another one that must be closed to make room, or None."""
        self._all[fd] = address, one
        self._by_address.setdefault(address, {})[fd] = None
        if len(self._all) <= self._most:
            return None
        address_with_most = max(self._by_address, key=lambda each: len(self._by_address[each]))
        return self.pop(next(iter(self._by_address[address_with_most])))

    def pop(self, fd: int) -> T:
        """Removes a connection and returns it."""
        address, one = self._all.pop(fd)
        same_address = self._by_address[address]
        del same_address[fd]
        if not same_address:
            del self._by_address[address]
        return one
