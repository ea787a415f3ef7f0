"""Waits until any of several connections, pipes or signals is ready, in all processes of a job."""

from __future__ import annotations

import select
from collections.abc import Callable, Iterable

READ, WRITE = select.POLLIN, select.POLLOUT
Source = tuple[int, int, Callable[[], object]]  # a descriptor, READ or WRITE or both, and what to call


def serve(seconds: float | None, sources: Iterable[Source]) -> None:
    """Waits up to `seconds` seconds, and calls the handlers of sources that are ready."""
    poll, handlers = select.poll(), dict[int, Callable[[], object]]()
    for fd, events, handle in sources:
        poll.register(fd, events)
        handlers[fd] = handle
    for fd, _ in poll.poll(None if seconds is None else seconds * 1000):
        handlers[fd]()
