"""Connects ranks of different hosts without MPI: a stream socket between each pair, which the native transport takes.

Every rank listens on a port, its door, while its process lives; the launcher tells every rank the doors of all ranks
(membership.py). Of two ranks, the higher one connects to the door of the lower one. Each proves to the other that it
knows the job's secret, by an HMAC over both sides' nonces; nothing else is read before the proof. As in MPI, nothing is
encrypted.

One thread serves the door and never waits for a peer: a stranger costs it at most a nonce of 16 bytes and one proof.
Only a few unproven connections are open at a time, and new ones push out old ones (link/connections.py). A rank
that a flood pushed out connects again.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from keras_ddl import config
from keras_ddl.errors import RankLostError
from keras_ddl.link.connections import Unproven, keep_alive
from keras_ddl.topology.launcher import host_key

_NONCE_BYTES = _KEY_BYTES = 16
_KNOCK = struct.Struct(f"!B{_KEY_BYTES}sII{_NONCE_BYTES}s")  # purpose, key, from, to, nonce
_PROOF_BYTES = 32
_MESSAGE_BYTES = _KNOCK.size + _PROOF_BYTES
_CONNECT, _LOOK = 1, 2  # the purposes
_OPEN, _GIVEN_UP = b"\1", b"\2"  # the answers
_KNOCK_SECONDS = 10.0  # for a knock, from its connection to its answer; so long both sides try
_AGAIN_SECONDS = 0.02
_LOOK_AFTER_SECONDS = 1.0
_MAX_STRANGERS = 256  # at a time, beside the ranks
_ACCEPTED_AT_ONCE = 32  # before those who have knocked are heard again
_SWEEP_SECONDS = 1.0


@dataclass(frozen=True)
class Door:
    """The address of a rank. `host`: equal for ranks that share memory."""

    address: str
    port: int
    host: str


@dataclass(frozen=True)
class Doors:
    """The doors of all ranks of a membership, by the launcher's numbers."""

    by_rank: dict[int, Door]
    secret: bytes = field(repr=False)


@dataclass
class _Knock:
    """A connection without a proof so far. `message`: the bytes received, which will contain the proof."""

    connection: socket.socket
    nonce: bytes
    until: float
    message: bytes = b""


class Doorkeeper:
    """This process's door, served by a thread of its own."""

    def __init__(self, rank: int, size: int = 1) -> None:
        """`rank`: the launcher's number of this rank. `size`: the job's. Raises: OSError: no port can be opened."""
        self.rank = rank
        self._doors = Doors({}, b"")
        self._listener = socket.create_server(("", 0), backlog=1024)
        self._listener.setblocking(False)
        self._changed = threading.Condition()  # guards what follows
        self._arrived: dict[tuple[bytes, int], socket.socket] = {}
        self._given_up: set[bytes] = set()
        self._introduced = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Of the door's thread alone:
        self._knocks: Unproven[_Knock] = Unproven(_MAX_STRANGERS + size)
        self._poll = select.epoll()
        threading.Thread(target=self._serve, name="keras_ddl-door", daemon=True).start()

    def describe(self) -> dict[str, object]:
        """Returns what the launcher should tell the other ranks about this door."""
        return {"port": self._listener.getsockname()[1], "host": host_key()}

    def introduce(self, doors: Doors) -> None:
        """Sets the doors of all ranks. Earlier connections wait for this call."""
        with self._changed:
            self._doors = doors
        os.eventfd_write(self._introduced, 1)

    def others(self, world_ranks: Sequence[int]) -> list[int]:
        """Returns those of `world_ranks` that are on other hosts."""
        here = self._doors.by_rank[self.rank].host
        return [rank for rank in world_ranks if self._doors.by_rank[rank].host != here]

    def connect(
        self, key: str, world_ranks: Sequence[int], check: Callable[[list[int]], None]
    ) -> dict[int, socket.socket]:
        """Returns connections with the ranks of other hosts, by the launcher's numbers. COLLECTIVE over `world_ranks`.

        Args:
            key: identifies this transport; equal on all ranks and never used before.
            check: called ten times a second with the ranks that are not connected yet. May raise.

        Raises: RankLostError: a rank died, cannot be reached, or has given up.
        """
        digest = hashlib.blake2b(key.encode(), digest_size=_KEY_BYTES).digest()
        connected: dict[int, socket.socket] = {}
        others = self.others(world_ranks)
        try:
            for rank in others:
                if rank < self.rank:
                    connected[rank] = self._knock(rank, _CONNECT, digest)
            self._wait_for([rank for rank in others if rank > self.rank], digest, connected, check)
        except BaseException:
            with self._changed:
                self._given_up.add(digest)  # for those who will wait for this rank
                for arrived in [at for at in self._arrived if at[0] == digest]:
                    self._arrived.pop(arrived).close()
            for connection in connected.values():
                connection.close()
            raise
        for connection in connected.values():
            _configure(connection)
        return connected

    def _wait_for(
        self,
        ranks: list[int],
        digest: bytes,
        connected: dict[int, socket.socket],
        check: Callable[[list[int]], None],
    ) -> None:
        look_at = time.monotonic() + _LOOK_AFTER_SECONDS
        while True:
            with self._changed:
                for rank in ranks:
                    if (digest, rank) in self._arrived:
                        connected[rank] = self._arrived.pop((digest, rank))
                missing = [rank for rank in ranks if rank not in connected]
                if not missing:
                    return
                self._changed.wait(0.1)
            check(missing)
            if time.monotonic() >= look_at:
                for rank in missing:
                    self._knock(rank, _LOOK, digest).close()
                look_at = time.monotonic() + _LOOK_AFTER_SECONDS

    def _knock(self, rank: int, purpose: int, digest: bytes) -> socket.socket:
        door = self._doors.by_rank[rank]
        where = f"its process does not answer on port {door.port} of {door.address}"
        until = time.monotonic() + _KNOCK_SECONDS
        while True:
            try:
                connection = socket.create_connection((door.address, door.port), timeout=_KNOCK_SECONDS)
            except OSError as error:
                raise RankLostError(
                    f"rank {rank} died, or cannot be reached: {where} ({error}). Ranks need TCP connections between "
                    "all hosts."
                ) from None
            with contextlib.ExitStack() as on_error:
                on_error.callback(connection.close)
                try:
                    nonce = _receive(connection, _NONCE_BYTES)
                    own_nonce = os.urandom(_NONCE_BYTES)
                    message = _KNOCK.pack(purpose, digest, self.rank, rank, own_nonce)
                    connection.sendall(message + self._proof(b"knock", nonce, message))
                    answer, proof = _receive(connection, 1), _receive(connection, _PROOF_BYTES)
                except ConnectionError as error:
                    # Strangers may have pushed this knock out. A process that has died refuses the next one.
                    if time.monotonic() < until:
                        time.sleep(_AGAIN_SECONDS)
                        continue
                    raise RankLostError(f"rank {rank} died: {where} ({error}).") from None
                except OSError as error:
                    raise RankLostError(f"rank {rank} died: {where} ({error}).") from None
                if not hmac.compare_digest(proof, self._proof(b"answer", own_nonce, answer)):
                    raise RankLostError(
                        f"rank {rank} cannot be reached: another process answers on port {door.port} of {door.address}."
                    )
                if answer != _OPEN:
                    raise RankLostError(f"rank {rank} no longer waits: it has lost another rank.")
                on_error.pop_all()
                return connection

    # ---- the door's thread ---------------------------------------------------------------------------------------

    def _serve(self) -> None:
        self._poll.register(self._listener, select.EPOLLIN)
        self._poll.register(self._introduced, select.EPOLLIN)
        sweep_at = 0.0
        while True:
            ready = [fd for fd, _ in self._poll.poll(_SWEEP_SECONDS)]
            for fd in ready:
                if fd in self._knocks:
                    self._hear(fd)
            if self._introduced in ready:
                os.eventfd_read(self._introduced)
                for fd in self._knocks:
                    self._answer(fd)
            if self._listener.fileno() in ready:
                self._accept()
            if (now := time.monotonic()) >= sweep_at:
                sweep_at = now + _SWEEP_SECONDS
                for fd in self._knocks:
                    if now >= self._knocks[fd].until:
                        self._knocks.pop(fd).connection.close()

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                connection, (address, _) = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:  # too many open files, say
                time.sleep(0.1)
                return
            knock = _Knock(connection, os.urandom(_NONCE_BYTES), time.monotonic() + _KNOCK_SECONDS)
            try:
                connection.setblocking(False)
                connection.send(knock.nonce)  # a new socket takes these few bytes
            except OSError:
                connection.close()
                continue
            self._poll.register(connection, select.EPOLLIN)
            if (pushed_out := self._knocks.add(connection.fileno(), address, knock)) is not None:
                pushed_out.connection.close()

    def _hear(self, fd: int) -> None:
        knock = self._knocks[fd]
        try:
            part = knock.connection.recv(_MESSAGE_BYTES - len(knock.message))
        except BlockingIOError:
            return
        except OSError:
            part = b""
        knock.message += part
        if not part:
            self._knocks.pop(fd).connection.close()
        elif len(knock.message) == _MESSAGE_BYTES:
            self._poll.unregister(fd)  # nothing more is to come
            self._answer(fd)

    def _answer(self, fd: int) -> None:
        """Answers a complete message if this rank knows the secret; closes a connection whose proof is wrong."""
        knock = self._knocks[fd]
        if not self._doors.secret or len(knock.message) < _MESSAGE_BYTES:
            return
        self._knocks.pop(fd)
        message, proof = knock.message[: _KNOCK.size], knock.message[_KNOCK.size :]
        purpose, digest, source, target, other_nonce = _KNOCK.unpack(message)
        is_of_the_job = hmac.compare_digest(proof, self._proof(b"knock", knock.nonce, message))
        try:
            if is_of_the_job and target == self.rank:
                with self._changed:
                    answer = _GIVEN_UP if digest in self._given_up else _OPEN
                    knock.connection.send(answer + self._proof(b"answer", other_nonce, answer))
                    if answer == _OPEN and purpose == _CONNECT:
                        self._arrived[digest, source] = knock.connection
                        self._changed.notify_all()
                        return
        except OSError:
            pass
        knock.connection.close()

    def _proof(self, side: bytes, nonce: bytes, message: bytes) -> bytes:
        assert self._doors.secret, "an empty key proves nothing"
        return hmac.digest(self._doors.secret, side + b"\0" + nonce + message, "sha256")


def _configure(connection: socket.socket) -> None:
    """Lets the kernel end the connection when the other host is lost, because a lost host sends nothing."""
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if lost_after := config.get("LOST_AFTER_SECONDS"):
        keep_alive(connection, lost_after)


def _receive(connection: socket.socket, length: int) -> bytes:
    """Returns exactly `length` bytes."""
    data = b""
    while len(data) < length:
        part = connection.recv(length - len(data))
        if not part:
            raise ConnectionError("the connection has ended")
        data += part
    return data
