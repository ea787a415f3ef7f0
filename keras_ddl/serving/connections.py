"""A bounded number of HTTP connections: health has always room, because the one that idles longest gives way."""

from __future__ import annotations

import asyncio
import resource
from typing import Any

from aiohttp import web

_KEPT_FILES = 200  # for models, logs, and gRPC's own
_MOST_FILES = 8192
_MOST_CONNECTIONS = 1000  # of an interface


def connections() -> int:
    """Returns how many connections each interface may have, after raising the limit of open files if that is low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < _MOST_FILES:
        soft = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    files = _MOST_FILES if soft == resource.RLIM_INFINITY else soft
    return max(10, min(_MOST_CONNECTIONS, (files - _KEPT_FILES) // 2))


class Connections:
    """Makes the protocols of connections, as asyncio's servers ask for them."""

    def __init__(self, make: web.Server, most: int) -> None:
        self._make, self._most = make, most
        self._open: dict[Any, None] = {}  # in the order in which they came

    def __call__(self) -> asyncio.Protocol:
        self._open = {each: None for each in self._open if each.transport is not None}
        if len(self._open) >= self._most:
            idle = (each for each in self._open if each._current_request is None)
            oldest = next(idle, next(iter(self._open)))
            del self._open[oldest]
            oldest.transport.abort()
        protocol = self._make()
        self._open[protocol] = None
        return protocol
