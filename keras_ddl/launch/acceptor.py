"""The launcher's listening socket, and the connections that have not yet proven to be a rank's.

Anybody on the network may connect. Before its proof, a connection may send a few kilobytes, which are not parsed.
Only a few unproven connections are open at a time, and they are closed after a while. A rank that a flood of them
pushed out connects again (rank_process.py).
"""

from __future__ import annotations

import os
import socket
import time
from typing import Any

from keras_ddl.files.private import is_own_peer
from keras_ddl.launch import host_facts
from keras_ddl.link.channel import Channel
from keras_ddl.link.connections import LOST_AFTER_SECONDS, Unproven
from keras_ddl.link.handshake import verify
from keras_ddl.link.kinds import FROM_UNPROVEN_RANK, NONCE_BYTES, Kind

# A rank answers at once; this allows for one on a machine that freezes meanwhile.
_PROOF_SECONDS = 30.0
# In addition to the ranks of the job.
_EXTRA_CONNECTIONS = 64
_ACCEPTED_AT_ONCE = 32  # before ranks are heard again


class Acceptor:
    """Accepts the ranks' connections until `close`.

    Never blocks: the owner polls `fds` for reading and calls `serve`, and `tick` every second.
    """

    def __init__(
        self, listener: socket.socket, token: str, num_ranks: int, lost_after: float = LOST_AFTER_SECONDS
    ) -> None:
        """`lost_after`: as for Channel."""
        self._listener, self._token, self._lost_after = listener, token, lost_after
        # (channel, nonce, deadline, our clock when the nonce was sent)
        self._pending: Unproven[tuple[Channel, bytes, float, float]] = Unproven(num_ranks + _EXTRA_CONNECTIONS)

    @property
    def fds(self) -> list[int]:
        """The descriptors to poll for reading; none after `close`."""
        listening = [] if self._listener.fileno() < 0 else [self._listener.fileno()]
        return [*listening, *self._pending]

    @property
    def has_pending(self) -> bool:
        return len(self._pending) > 0

    def serve(self, fd: int) -> tuple[Channel, dict[str, Any]] | None:
        """Returns (channel, its HELLO message) when the connection `fd` has just proven to be a rank's, else None.

        Adds "offset" and "offset_error" of that host's clock to the message's "facts", if it has any.
        """
        if fd == self._listener.fileno():
            self._accept()
        elif fd in self._pending:
            return self._read(fd)
        return None

    def tick(self) -> None:
        """Closes the unproven connections whose time limit has passed."""
        now = time.monotonic()
        for fd in self._pending:
            if now > self._pending[fd][2]:
                self._drop(fd)

    def close(self) -> None:
        """Accepts no more connections, and closes those without a proof."""
        self._listener.close()
        for fd in self._pending:
            self._drop(fd)

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                sock, address = self._listener.accept()
                if sock.family == socket.AF_UNIX and not is_own_peer(sock):
                    sock.close()
                    continue
                channel = Channel(sock, FROM_UNPROVEN_RANK, self._lost_after)
            except OSError:
                return
            nonce, sent = os.urandom(NONCE_BYTES), time.time()
            fd = channel.fileno()
            channel.send(Kind.NONCE, nonce)
            if channel.closed:  # by who has opened it
                continue
            pending = channel, nonce, time.monotonic() + _PROOF_SECONDS, sent
            if (pushed_out := self._pending.add(fd, address[0] if address else "", pending)) is not None:
                pushed_out[0].close()

    def _read(self, fd: int) -> tuple[Channel, dict[str, Any]] | None:
        channel, nonce, _, sent = self._pending[fd]
        frame = next(channel.read(), None)
        if frame is None and not channel.closed:
            return None
        self._pending.pop(fd)
        hello = None if frame is None else verify(self._token, "rank", nonce, frame[1])
        if hello is None:
            channel.close()
            return None
        channel.mark_authenticated()
        if "facts" in hello:
            facts = hello["facts"]
            facts["offset"], facts["offset_error"] = host_facts.clock_offset(facts["clock"], sent, time.time())
        return channel, hello

    def _drop(self, fd: int) -> None:
        self._pending.pop(fd)[0].close()
