"""Limits the number of connections, so that one client cannot use up all of them.

Each interface has the same limit. If a client connects beyond it, the server closes another connection, one without a
complete request if possible.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from aiohttp import web

_KEPT_FILES = 220  # for models, logs, gRPC's own, and connections that are accepted but not yet counted
_MOST_FILES = 8192
_MOST_CONNECTIONS = 500  # per interface
_ROOM = 3  # gRPC accepts this many times the limit, because connections arrive between two polls
_LOOK_SECONDS = 0.1
_Address = tuple[str, int]


def connections() -> int:
    """Raises a low limit of open files; returns how many connections each interface may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < _MOST_FILES:
        soft = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    files = _MOST_FILES if soft == resource.RLIM_INFINITY else soft
    return max(10, min(_MOST_CONNECTIONS, (files - _KEPT_FILES) // (1 + _ROOM)))


class Connections:
    """A protocol factory for asyncio's servers. At the limit it closes older connections, busy ones last."""

    def __init__(self, make: web.Server, most: int) -> None:
        self._make, self._most = make, most

    def __call__(self) -> asyncio.Protocol:
        # Open connections, oldest first. asyncio accepts some 100 at once and adds them later.
        before = self._make.connections
        if len(before) >= self._most:
            before.sort(key=_is_busy)
            for each in before[: len(before) - self._most + 1]:
                if each.transport is not None:
                    each.transport.abort()
        return self._make()


def _is_busy(connection: web.RequestHandler) -> bool:
    """Whether a complete request has arrived on the connection and is not answered yet."""
    request = connection._current_request
    return request is not None and request.content.is_eof()


class GrpcConnections:
    """Ends connections beyond gRPC's limit; gRPC itself would close new connections and keep old ones.

    gRPC does not name its connections, so `watch` finds them among this process's open files. All methods must be
    called on the event loop.

    Attributes:
        accepted: number of connections that gRPC may accept at the same time.
    """

    def __init__(self, most: int) -> None:
        self._most, self.accepted = most, _ROOM * most
        self._silent: dict[_Address, None] = {}  # clients without a request so far, oldest first
        self._used: dict[_Address, None] = {}  # clients with requests, the longest unused first; some may have left

    def used(self, peer: str) -> None:
        """Notes that a complete request has arrived. `peer`: the client, as for `disconnect`."""
        address = _address_of(peer)
        self._used.pop(address, None)
        self._used[address] = None
        if len(self._used) > _MOST_FILES:
            del self._used[next(iter(self._used))]

    async def watch(self, port: int, busy: Callable[[], set[str]]) -> None:
        """Watches the connections to `port` until it is cancelled, and ends connections beyond the limit.

        First it ends connections without a request, except new ones since the last poll. If the rest are still too
        many, it ends those that have been unused for longest.

        Args:
            port: the server's port.
            busy: returns the clients whose requests are in progress, in the form of `disconnect`; they stay.
        Cost: reads the list of open files; above the limit, some microseconds for each connection.
        """
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            if len(_descriptors()) <= self._most:
                self._silent.clear()
                continue
            present = await asyncio.to_thread(_peers_at, port)
            silent = [each for each in self._silent if each in present and each not in self._used]
            kept = {_address_of(peer) for peer in busy()}
            used = [each for each in self._used if each in present]
            idle = [each for each in used if each not in kept]
            stale = {*silent[: max(0, len(present) - self._most)], *idle[: max(0, len(used) - self._most)]}
            self._silent = dict.fromkeys((*silent, *(each for each in present if each not in self._used)))
            if stale:
                await asyncio.to_thread(_end, stale)


def disconnect(peer: str) -> None:
    """Ends the connections of a gRPC client, because gRPC keeps a response for as long as the client does not read it.

    Args:
        peer: gRPC's name, "ipv4:127.0.0.1:5000" or "ipv6:%5B::1%5D:5000"; peers on UNIX sockets have no names.
    """
    _end({_address_of(peer)})


def _end(peers: set[_Address]) -> None:
    for _, peer, connection in _open_connections():
        if peer in peers:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


def _peers_at(port: int) -> dict[_Address, None]:
    return {peer: None for own, peer, _ in _open_connections() if own[1] == port}


def _open_connections() -> Iterator[tuple[_Address, _Address, socket.socket]]:
    """Yields (own address, peer's address, socket) of each TCP connection of this process, then closes the socket."""
    for descriptor in _descriptors():
        try:
            copy = os.dup(descriptor)
        except OSError:  # already closed
            continue
        try:
            each = socket.socket(fileno=copy)
        except OSError:  # not a socket
            os.close(copy)
            continue
        with each:
            if each.family in (socket.AF_INET, socket.AF_INET6):
                try:
                    own, peer = _address(each.getsockname()), _address(each.getpeername())
                except OSError:  # a listening socket, or the peer has left
                    continue
                yield own, peer, each


def _descriptors() -> list[int]:
    return [int(each.name) for each in Path("/proc/self/fd").iterdir()]


def _address(name: Any) -> _Address:
    host, port = name[:2]
    return str(host).removeprefix("::ffff:"), int(port)


def _address_of(peer: str) -> _Address:
    host, _, port = urllib.parse.unquote(peer).partition(":")[2].rpartition(":")
    return host.strip("[]").removeprefix("::ffff:"), int(port) if port.isdecimal() else 0
