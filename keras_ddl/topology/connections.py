"""TCP connections between hosts, as the launcher and the ranks use them."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


def keep_alive(connection: socket.socket, seconds: float) -> None:
    """Makes a TCP connection fail when the other host has not answered for about so many seconds.

    A host that vanishes sends nothing, and otherwise TCP waits for it for hours.
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
    """Connections of anybody, which have not yet proved that they are of this job, by their descriptors.

    There are at most so many. When they are too many, the address with the most of them loses its oldest one. So who
    floods a port shuts out itself and not those at other addresses; and of one address those go first that would have
    proved long before what they are.
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
        """Adds one; returns another that must be closed to make room."""
        self._all[fd] = address, one
        self._by_address.setdefault(address, {})[fd] = None
        if len(self._all) <= self._most:
            return None
        address_with_most = max(self._by_address, key=lambda each: len(self._by_address[each]))
        return self.pop(next(iter(self._by_address[address_with_most])))

    def pop(self, fd: int) -> T:
        """Removes one and returns it."""
        address, one = self._all.pop(fd)
        of_address = self._by_address[address]
        del of_address[fd]
        if not of_address:
            del self._by_address[address]
        return one
