"""Limits the number of connections and ends them, so that one client cannot use up what others need."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import urllib.parse
from pathlib import Path

from aiohttp import web

_KEPT_FILES = 220  # for models, logs, gRPC's own, and connections that are accepted but not yet counted
_MOST_FILES = 8192
_MOST_CONNECTIONS = 1000  # per interface


def connections() -> int:
    """Raises a low limit of open files; returns how many connections each interface may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < _MOST_FILES:
        soft = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    files = _MOST_FILES if soft == resource.RLIM_INFINITY else soft
    return max(10, min(_MOST_CONNECTIONS, (files - _KEPT_FILES) // 2))


class Connections:
    """A protocol factory for asyncio's servers. At the limit it closes older connections, idle ones first."""

    def __init__(self, make: web.Server, most: int) -> None:
        self._make, self._most = make, most

    def __call__(self) -> asyncio.Protocol:
        # Open connections, oldest first. asyncio accepts some 100 at once, which are added later.
        before = self._make.connections
        if len(before) >= self._most:
            before.sort(key=lambda each: each._current_request is not None)
            for each in before[: len(before) - self._most + 1]:
                if each.transport is not None:
                    each.transport.abort()
        return self._make()


def disconnect(peer: str) -> None:
    """Ends the connections of a gRPC client: gRPC itself keeps a response as long as the client does not read it.

    Args:
        peer: gRPC's name, "ipv4:127.0.0.1:5000" or "ipv6:%5B::1%5D:5000"; peers at unix sockets have no names.
    """
    host, _, port = urllib.parse.unquote(peer).partition(":")[2].rpartition(":")
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # it has been closed meanwhile
            if descriptor.is_socket():
                with socket.socket(fileno=os.dup(int(descriptor.name))) as each:
                    theirs = [str(part).removeprefix("::ffff:") for part in each.getpeername()[:2]]
                    if theirs == [host.strip("[]"), port]:
                        each.shutdown(socket.SHUT_RDWR)
