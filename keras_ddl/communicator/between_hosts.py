"""Connects ranks of different hosts without MPI: a stream socket between each two, which the native transport takes.

Every rank listens at a port, its door, for as long as its process lives; the launcher tells all ranks the doors of all
(membership.py). Of two ranks, the higher one connects to the door of the lower one. Each proves to the other that it
knows the job's secret, by an HMAC over both sides' nonces; nothing else of a connection is read before. As in MPI,
nothing is encrypted.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import itertools
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from keras_ddl import config
from keras_ddl.errors import RankLostError
from keras_ddl.topology.connections import keep_alive
from keras_ddl.topology.launcher import host_key

_NONCE_BYTES = _KEY_BYTES = 16
_KNOCK = struct.Struct(f"!B{_KEY_BYTES}sII{_NONCE_BYTES}s")  # purpose, key, from, to, nonce
_PROOF_BYTES = 32
_CONNECT, _LOOK = 1, 2  # the purposes
_OPEN, _GIVEN_UP = b"\1", b"\2"  # the answers
_KNOCK_SECONDS = 10.0
_PROOF_SECONDS = 5.0  # for a knock, once this rank can check it
_LOOK_AFTER_SECONDS = 1.0
_MAX_KNOCKS = 256  # at a time; the oldest makes room for the next


@dataclass(frozen=True)
class Door:
    """Where a rank can be reached. `host`: equal for ranks that share memory."""

    address: str
    port: int
    host: str


@dataclass(frozen=True)
class Doors:
    """The doors of all ranks of a membership, by the launcher's numbers."""

    by_rank: dict[int, Door]
    secret: bytes = field(repr=False)


class Doorkeeper:
    """This process's door. Threads of its own answer who knocks."""

    def __init__(self, rank: int) -> None:
        """`rank`: the launcher's number of this one. Raises: OSError: no port can be opened."""
        self.rank = rank
        self._doors = Doors({}, b"")
        self._listener = socket.create_server(("", 0), backlog=1024)
        self._changed = threading.Condition()  # guards what follows
        self._arrived: dict[tuple[bytes, int], socket.socket] = {}
        self._given_up: set[bytes] = set()
        self._knocks: dict[int, socket.socket] = {}  # those that have proved nothing yet, the oldest first
        self._numbers = itertools.count()
        threading.Thread(target=self._accept, name="keras_ddl-door", daemon=True).start()

    def describe(self) -> dict[str, object]:
        """Returns what the launcher is to tell the other ranks of this door."""
        return {"port": self._listener.getsockname()[1], "host": host_key()}

    def introduce(self, doors: Doors) -> None:
        """Sets the doors of all ranks. Who has knocked before waits for it."""
        with self._changed:
            self._doors = doors
            self._changed.notify_all()

    def others(self, world_ranks: Sequence[int]) -> list[int]:
        """Returns those of `world_ranks` that are on other hosts."""
        here = self._doors.by_rank[self.rank].host
        return [rank for rank in world_ranks if self._doors.by_rank[rank].host != here]

    def connect(
        self, key: str, world_ranks: Sequence[int], check: Callable[[list[int]], None]
    ) -> dict[int, socket.socket]:
        """Returns connections with the ranks of other hosts, by the launcher's numbers. COLLECTIVE over `world_ranks`.

        Args:
            key: of this transport, equal on all ranks and never used before.
            check: called ten times a second with the ranks that have not come yet. May raise.

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
        where = f"its process does not answer at port {door.port} of {door.address}"
        try:
            connection = socket.create_connection((door.address, door.port), timeout=_KNOCK_SECONDS)
        except OSError as error:
            raise RankLostError(
                f"rank {rank} died, or cannot be reached: {where} ({error}). Ranks need TCP connections between all "
                "hosts."
            ) from None
        with _closing_on_error(connection):
            try:
                nonce = _receive(connection, _NONCE_BYTES)
                own_nonce = os.urandom(_NONCE_BYTES)
                message = _KNOCK.pack(purpose, digest, self.rank, rank, own_nonce)
                connection.sendall(message + self._proof(b"knock", nonce, message))
                answer, proof = _receive(connection, 1), _receive(connection, _PROOF_BYTES)
            except OSError as error:
                raise RankLostError(f"rank {rank} died: {where} ({error}).") from None
            if not hmac.compare_digest(proof, self._proof(b"answer", own_nonce, answer)):
                raise RankLostError(f"rank {rank} cannot be reached: at port {door.port} of {door.address} is another.")
            if answer != _OPEN:
                raise RankLostError(f"rank {rank} does not wait any more: it has lost another rank.")
        return connection

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                time.sleep(0.1)  # too many open files, say
                continue
            number = next(self._numbers)
            with self._changed:
                self._knocks[number] = connection
                if len(self._knocks) > _MAX_KNOCKS:  # a rank would have proved what it is long before
                    with contextlib.suppress(OSError):
                        next(iter(self._knocks.values())).shutdown(socket.SHUT_RDWR)
            try:
                threading.Thread(
                    target=self._answer, args=(number, connection), name="keras_ddl-knock", daemon=True
                ).start()
            except RuntimeError:  # no more threads
                self._forget(number)
                connection.close()

    def _forget(self, number: int) -> None:
        with self._changed:
            self._knocks.pop(number, None)

    def _answer(self, number: int, connection: socket.socket) -> None:
        try:
            with _closing_on_error(connection):
                nonce = os.urandom(_NONCE_BYTES)
                with self._changed:  # nobody can prove anything before this rank knows the secret
                    if not self._changed.wait_for(lambda: self._doors.secret, _KNOCK_SECONDS):
                        raise ConnectionError("too early")
                until = time.monotonic() + _PROOF_SECONDS
                connection.settimeout(_PROOF_SECONDS)
                connection.sendall(nonce)
                message = _receive(connection, _KNOCK.size, until)
                proof = _receive(connection, _PROOF_BYTES, until)
                if not hmac.compare_digest(proof, self._proof(b"knock", nonce, message)):
                    raise ConnectionError("no rank of this job")
                purpose, digest, source, target, other_nonce = _KNOCK.unpack(message)
                if target != self.rank:
                    raise ConnectionError("another rank is meant")
                with self._changed:
                    answer = _GIVEN_UP if digest in self._given_up else _OPEN
                    connection.sendall(answer + self._proof(b"answer", other_nonce, answer))
                    if answer == _OPEN and purpose == _CONNECT:
                        self._arrived[digest, source] = connection
                        self._changed.notify_all()
                        return
            connection.close()
        except OSError:
            pass
        finally:
            self._forget(number)

    def _proof(self, side: bytes, nonce: bytes, message: bytes) -> bytes:
        assert self._doors.secret, "an empty key proves nothing"
        return hmac.digest(self._doors.secret, side + b"\0" + nonce + message, "sha256")


def _configure(connection: socket.socket) -> None:
    """Lets the kernel end the connection when the other host is gone, which sends nothing."""
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if lost_after := config.get("LOST_AFTER_SECONDS"):
        keep_alive(connection, lost_after)


def _receive(connection: socket.socket, length: int, until: float | None = None) -> bytes:
    """Returns so many bytes. until: by time.monotonic(); None: as long as each part comes in time."""
    data = b""
    while len(data) < length:
        if until is not None:
            connection.settimeout(max(0.001, until - time.monotonic()))
        part = connection.recv(length - len(data))
        if not part:
            raise ConnectionError("the connection has ended")
        data += part
    return data


@contextlib.contextmanager
def _closing_on_error(connection: socket.socket) -> Iterator[None]:
    try:
        yield
    except BaseException:
        connection.close()
        raise
