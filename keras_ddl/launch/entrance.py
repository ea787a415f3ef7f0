"""Where ranks come in: the launcher's listening socket, and the connections that have not yet proven to be a rank's.

Anybody on the network may connect. Of what a stranger sends, a few kilobytes are kept and none is looked into;
strangers are few at a time, and none stays for long.
"""

from __future__ import annotations

import os
import socket
import time
from typing import Any

from keras_ddl.launch import control
from keras_ddl.launch.control import Channel, Kind

# A rank answers at once; this is for one on a machine that stands still meanwhile.
_PROOF_SECONDS = 30.0
# Beyond the ranks of the job. At the limit the oldest goes: a rank has answered before so many others have come.
_MORE_THAN_RANKS = 64


class Entrance:
    """Open until `close`. Never blocks: the owner polls `fds` for reading and calls `serve`; `tick` every second."""

    def __init__(self, listener: socket.socket, token: str, num_ranks: int) -> None:
        self._listener, self._token = listener, token
        self._most = num_ranks + _MORE_THAN_RANKS
        self._waiting: dict[int, tuple[Channel, bytes, float]] = {}  # with its nonce and the time of its end, in order

    @property
    def fds(self) -> list[int]:
        """The descriptors to poll for reading: none once it is closed."""
        listening = [] if self._listener.fileno() < 0 else [self._listener.fileno()]
        return [*listening, *self._waiting]

    @property
    def someone_waits(self) -> bool:
        """Whether there is a connection that may yet become a rank's."""
        return bool(self._waiting)

    def serve(self, fd: int) -> tuple[Channel, dict[str, Any]] | None:
        """Returns (channel, what it says of itself) when `fd` has just proven to be a rank's, else None."""
        if fd == self._listener.fileno():
            self._accept()
        elif fd in self._waiting:
            return self._read(fd)
        return None

    def tick(self) -> None:
        """Closes the connections whose time is over."""
        now = time.monotonic()
        for fd in [fd for fd, (_, _, end) in self._waiting.items() if now > end]:
            self._dismiss(fd)

    def close(self) -> None:
        """Takes no more connections, and closes those that have proven nothing."""
        self._listener.close()
        for fd in list(self._waiting):
            self._dismiss(fd)

    def _accept(self) -> None:
        try:
            channel = Channel(self._listener.accept()[0], control.FROM_A_STRANGER)
        except OSError:
            return
        if len(self._waiting) >= self._most:
            self._dismiss(next(iter(self._waiting)))
        nonce = os.urandom(control.NONCE_BYTES)
        self._waiting[channel.fileno()] = channel, nonce, time.monotonic() + _PROOF_SECONDS
        channel.send(Kind.NONCE, nonce)

    def _read(self, fd: int) -> tuple[Channel, dict[str, Any]] | None:
        channel, nonce, _ = self._waiting[fd]
        frame = next(channel.read(), None)
        if frame is None and not channel.closed:
            return None
        del self._waiting[fd]
        hello = None if frame is None else control.proven(self._token, "rank", nonce, frame[1])
        if hello is None:
            channel.close()
            return None
        channel.trust()
        return channel, hello

    def _dismiss(self, fd: int) -> None:
        self._waiting.pop(fd)[0].close()
