"""A listening socket, and the connections that have not yet proved that they belong to the job.

Anybody on the network may connect. Before its proof, a connection may send a few kilobytes, which are not parsed.
Only a few unproven connections are open at a time, and they are closed after a while. If too many strangers connect, a
process of the job may also lose its connection; it then connects again (handshake.py).
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from keras_ddl.config import Seconds
from keras_ddl.files.private import is_own_peer
from keras_ddl.link.channel import Channel
from keras_ddl.link.connections import Unproven
from keras_ddl.link.handshake import sign, verify
from keras_ddl.link.kinds import FROM_UNPROVEN_CALLER, NONCE_BYTES, Kind

_MAX_STRANGERS = 64  # open connections, in addition to those of the job's processes
_ACCEPTED_AT_ONCE = 32  # new connections, before open ones are served again


@dataclass
class Caller:
    """A process that has connected.

    Attributes:
        hello: the caller's facts about itself; {} before its proof.
        sent_at: our clock when the nonce was sent.
    """

    channel: Channel
    nonce: bytes = field(default_factory=lambda: os.urandom(NONCE_BYTES))
    until: float = field(default_factory=lambda: time.monotonic() + Seconds.PROOF)
    sent_at: float = field(default_factory=time.time)
    payload: bytes | None = None
    hello: dict[str, Any] = field(default_factory=dict)

    def welcome(self, secret: str, message: dict[str, Any]) -> None:
        """Proves to the caller that this process knows the secret."""
        self.channel.send(Kind.WELCOME, sign(secret, "listener", bytes.fromhex(self.hello["nonce"]), message))


class Listener:
    """Accepts connections until `close`. Never blocks: the owner polls `fds` for reading, and calls `serve` and `tick`.

    Args:
        secret: the secret that callers must know; "": it is not known yet, see `introduce`.
        num_callers: number of processes that may call.
        lost_after: as for Channel.
    """

    def __init__(
        self, sock: socket.socket, secret: str, num_callers: int, lost_after: float = Seconds.LOST_AFTER
    ) -> None:
        sock.setblocking(False)
        self._sock, self._secret, self._lost_after = sock, secret, lost_after
        self._unproven: Unproven[Caller] = Unproven(num_callers + _MAX_STRANGERS)
        self._rests = False  # accepts nothing until `tick`, for example because too many files are open

    @property
    def fds(self) -> list[int]:
        """The descriptors to poll for reading; none after `close`."""
        listening = [] if self._rests or self._sock.fileno() < 0 else [self._sock.fileno()]
        return [*listening, *(fd for fd in self._unproven if self._unproven[fd].payload is None)]

    @property
    def has_unproven(self) -> bool:
        return len(self._unproven) > 0

    def serve(self, fd: int) -> Caller | None:
        """Returns the caller at the connection `fd` when it has just proved that it knows the secret, else None."""
        if fd == self._sock.fileno():
            self._accept()
        elif fd in self._unproven:
            caller = self._unproven[fd]
            frame = next(caller.channel.read(), None)
            if frame is not None:
                caller.payload = frame[1]
                return self._proven(fd) if self._secret else None
            if caller.channel.closed:
                self._unproven.pop(fd)
        return None

    def introduce(self, secret: str) -> Iterator[Caller]:
        """Sets the secret; yields the callers that have proved before that they know it."""
        self._secret = secret
        for fd in self._unproven:
            if self._unproven[fd].payload is not None and (caller := self._proven(fd)) is not None:
                yield caller

    def tick(self) -> None:
        """Closes the unproven connections whose time limit has passed. Call it every second."""
        now, self._rests = time.monotonic(), False
        for fd in self._unproven:
            if now > self._unproven[fd].until:
                self._unproven.pop(fd).channel.close()

    def close(self) -> None:
        """Accepts no more connections, and closes those without a proof."""
        self._sock.close()
        for fd in self._unproven:
            self._unproven.pop(fd).channel.close()

    def _proven(self, fd: int) -> Caller | None:
        caller = self._unproven.pop(fd)
        assert caller.payload is not None
        hello = verify(self._secret, "caller", caller.nonce, caller.payload)
        if hello is None:
            caller.channel.close()
            return None
        caller.hello = hello
        caller.channel.accept_all()
        return caller

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                sock, address = self._sock.accept()
                if sock.family == socket.AF_UNIX and not is_own_peer(sock):
                    sock.close()
                    continue
                caller = Caller(Channel(sock, FROM_UNPROVEN_CALLER, self._lost_after))
            except BlockingIOError:
                return
            except OSError:
                self._rests = True
                return
            fd = sock.fileno()
            caller.channel.send(Kind.NONCE, caller.nonce)
            if caller.channel.closed:  # by the caller
                continue
            pushed_out = self._unproven.add(fd, address[0] if address else "", caller)
            if pushed_out is not None:
                pushed_out.channel.close()
