"""One end of a connection between two processes of a job: framed messages over a stream.

A frame is one byte of `Kind`, eight bytes of length (big endian) and the payload. Connections are not encrypted; MPI's
own connections are not either.
"""

from __future__ import annotations

import errno
import json
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from keras_ddl.config import Seconds
from keras_ddl.link.connections import keep_alive
from keras_ddl.link.kinds import Kind
from keras_ddl.link.loop import READ, WRITE, serve

_HEADER = struct.Struct("!BQ")
_READ_BYTES = 1 << 18


def encoded(kind: Kind, payload: bytes | Mapping[str, Any] = b"") -> bytes:
    """Returns a frame."""
    body = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
    return _HEADER.pack(kind, len(body)) + body


class Channel:
    """One end of a connection. Its methods never block; the owner polls and calls `read` and `write`."""

    def __init__(
        self, sock: socket.socket, accepts: Mapping[int, int] | None, lost_after: float = Seconds.LOST_AFTER
    ) -> None:
        """
        Args:
            accepts: the kinds of frames that the peer may send, with size limits, perhaps until its proof; None: all.
            lost_after: seconds after which another host that does not answer counts as lost.
        """
        self.sock = sock
        self._accepts = accepts
        self.closed = False
        self.timed_out = False  # the network is down: the peer may live
        self.is_impostor = False  # whether the peer has sent a frame that it may not send
        self._incoming = bytearray()
        self._outgoing = bytearray()
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            keep_alive(sock, lost_after)

    def fileno(self) -> int:
        return self.sock.fileno()

    def accept_all(self) -> None:
        """Accepts all kinds of frames from now on, because the peer has proved that it knows the secret."""
        self._accepts = None

    @property
    def events(self) -> int:
        """The events for which to poll the connection."""
        return READ | (WRITE if self._outgoing else 0)

    @property
    def backlog(self) -> int:
        return len(self._outgoing)

    def send(self, kind: Kind, payload: bytes | Mapping[str, Any] = b"") -> None:
        """Queues a frame and sends what the socket takes now."""
        if self.closed:
            return
        self._outgoing += encoded(kind, payload)
        self.write()

    def write(self) -> None:
        """Sends as much of the backlog as the socket takes."""
        while self._outgoing and not self.closed:
            try:
                sent = self.sock.send(self._outgoing[:_READ_BYTES])
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self.timed_out = error.errno == errno.ETIMEDOUT
                self.close()
                return
            del self._outgoing[:sent]

    def read(self) -> Iterator[tuple[Kind, bytes]]:
        """Yields the complete frames that have arrived. At the end of the connection `closed` becomes true."""
        taken = 0
        while taken < _READ_BYTES and not self.closed:
            # If only some kinds are accepted, it reads no byte beyond a frame, because another reader may need it.
            most = _READ_BYTES if self._accepts is None else self._missing()
            try:
                data = self.sock.recv(most)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self.timed_out = error.errno == errno.ETIMEDOUT
                data = b""
            if not data:
                self.close()
            self._incoming += data
            taken += _READ_BYTES if self._accepts is None else len(data)
            while len(self._incoming) >= _HEADER.size:
                kind, size = _HEADER.unpack_from(self._incoming)
                if self._accepts is not None and size > self._accepts.get(kind, -1):
                    self.is_impostor = True
                    self.close()
                    return
                end = _HEADER.size + size
                if end > len(self._incoming):
                    break
                payload = bytes(self._incoming[_HEADER.size : end])
                del self._incoming[:end]
                yield Kind(kind), payload

    def _missing(self) -> int:
        """Returns how many bytes the frame that has begun to arrive lacks, as far as is known."""
        if len(self._incoming) < _HEADER.size:
            return _HEADER.size - len(self._incoming)
        _, size = _HEADER.unpack_from(self._incoming)
        return min(_READ_BYTES, _HEADER.size + size - len(self._incoming))

    def is_ready(self, events: int, seconds: float | None) -> bool:
        """Waits until the connection is ready for `events` (loop.py). None: without a limit."""
        ready: list[int] = []
        serve(None if seconds is None else max(0.0, seconds), [(self.fileno(), events, partial(ready.append, 1))])
        return bool(ready)

    def receive(self, until: float) -> tuple[Kind, bytes]:
        """Waits for the next frame of a peer that may not send all kinds.

        Raises: ConnectionError: the connection has ended. TimeoutError: time.monotonic() has reached `until`.
        """
        while not self.closed:
            for frame in self.read():
                return frame
            if not self.closed and not self.is_ready(READ, until - time.monotonic()):
                raise TimeoutError("timed out")
        raise ConnectionError("the connection has ended")

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._outgoing.clear()
            self.sock.close()
