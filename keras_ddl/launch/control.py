"""The connection between the launcher and the process that wraps each rank: framed messages over a stream.

It is a UNIX socket in the job's private directory if all ranks are on the launcher's host, else TCP.

A frame is one byte of `Kind`, eight bytes of length (big endian) and the payload. The launcher sends a nonce first.
Then each side proves that it knows the job's token, by an HMAC over the other's nonce and its own first message. So
nobody else can read a rank's output or start a program through this port, and a rank runs nothing for an impostor. No
payload is parsed before the proof. The connection is not encrypted; MPI's own connections are not either.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import fcntl
import hmac
import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from keras_ddl.errors import LaunchError
from keras_ddl.topology.connections import keep_alive

_HEADER = struct.Struct("!BQ")
_READ_BYTES = 1 << 18
NONCE_BYTES = 32
_PROOF_BYTES = 32
_SIOCGIFADDR = 0x8915
LOST_AFTER_SECONDS = 25.0  # a network may be down for a moment
FILE_CHUNK_BYTES = 1 << 20
RECORD_HEADER_BYTES = 4  # of Kind.RECORD from a rank
# In KERAS_DDL_RUN_DIR, for the program of `keras_ddl.run`: what it reads and what it leaves.
CALL_FILE = "call.pickle"
RESULT_FILE = "result.pickle"
# In KERAS_DDL_RUN_DIR, when the job would be started on other hosts now (host_watch.py).
HOSTS_FILE = "hosts-changed"


class Kind(enum.IntEnum):
    """The contents of a frame. L: sent by the launcher, R: sent by the rank's wrapper."""

    NONCE = 1  # L bytes
    HELLO = 2  # R proof, then JSON: nonce, rank, size, host, pid; with several hosts facts (host_facts.py)
    WELCOME = 3  # L proof, then JSON: environment, working directory, terminals
    FILE = 4  # L bytes of the file that `run(fn)` sends; an empty frame ends it
    START = 5  # L empty: all is sent, start the program
    OUT = 6  # R bytes of the program's stdout
    ERR = 7  # R bytes of the program's stderr
    STDIN = 8  # L bytes for the program's stdin; an empty frame closes it
    STDIN_CONSUMED = 9  # R JSON: number of bytes the program has taken
    TERMINAL_SIZE = 10  # L JSON: rows, columns
    RESULT = 11  # R bytes of the file that the program of `run(fn)` leaves
    EXIT = 12  # R JSON: status, stopped_by, report, report_age_seconds, checkpoint, in_job
    STOP = 13  # L JSON: signal, grace_seconds
    BYE = 14  # L JSON: last (no other attempt follows): the wrapper may leave
    HOSTS_CHANGED = 15  # L empty: create HOSTS_FILE for the program
    SIGNAL = 16  # L JSON: signal, for the program and nothing else
    QUESTION = 17  # R JSON: of the program, about the other ranks (membership_socket.py)
    ANSWER = 18  # L JSON: to it; for a membership epoch, members, ended, with several hosts doors, secret
    BOARD = 19  # L JSON: what the program's board is to show (communicator/board.py): has_question, admit_at
    SHOWN = 20  # R JSON: admit_at, which it shows now
    RECORD = 21  # R number of a newcomer, in four bytes, and what it is to get; L the latter, for the newcomer
    NEWS = 22  # R JSON, in a job that is watched: pid, checkpoints, figures (rank_news.py)


# The frames that a peer may send before its proof, and their size limits: it must not make us allocate memory.
PRE_AUTH_RANK_FRAMES: Mapping[int, int] = {Kind.HELLO: 1 << 12}
PRE_AUTH_LAUNCHER_FRAMES: Mapping[int, int] = {Kind.NONCE: NONCE_BYTES, Kind.WELCOME: 1 << 22}


def sign(token: str, side: str, nonce: bytes, message: dict[str, Any]) -> bytes:
    """Returns the payload of HELLO (`side` "rank") or WELCOME ("launcher"), for the other side's `nonce`."""
    body = json.dumps(message).encode()
    return _proof(token, side, nonce, body) + body


def verify(token: str, side: str, nonce: bytes, payload: bytes) -> dict[str, Any] | None:
    """Returns the message of a HELLO or WELCOME; None, without parsing it, when `side` does not know `token`."""
    received, body = payload[:_PROOF_BYTES], payload[_PROOF_BYTES:]
    if not hmac.compare_digest(received, _proof(token, side, nonce, body)):
        return None
    return json.loads(body)


def _proof(token: str, side: str, nonce: bytes, body: bytes) -> bytes:
    # The nonce has one length, so where the body begins cannot be moved.
    return hmac.digest(bytes.fromhex(token), side.encode() + b"\0" + nonce + body, "sha256")


class Channel:
    """One end of a connection. Its methods never block; the owner polls and calls `read` and `write`."""

    def __init__(
        self, sock: socket.socket, unauthenticated: Mapping[int, int], lost_after: float = LOST_AFTER_SECONDS
    ) -> None:
        """
        Args:
            unauthenticated: the kinds of frames that the peer may send before its proof, with size limits.
            lost_after: seconds after which another host that does not answer counts as lost.
        """
        self.sock = sock
        self._unauthenticated: Mapping[int, int] | None = unauthenticated
        self.closed = False
        self.timed_out = False  # the network is down: the peer may live
        self.is_impostor = False  # the peer has sent what it may not send before its proof
        self._incoming = bytearray()
        self._outgoing = bytearray()
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            keep_alive(sock, lost_after)

    def fileno(self) -> int:
        return self.sock.fileno()

    @property
    def authenticated(self) -> bool:
        return self._unauthenticated is None

    def mark_authenticated(self) -> None:
        """Accepts all kinds of frames from now on, because the peer has proven that it knows the token."""
        self._unauthenticated = None

    @property
    def backlog(self) -> int:
        return len(self._outgoing)

    def send(self, kind: Kind, payload: bytes | dict[str, Any] = b"") -> None:
        """Queues a frame and sends what the socket takes now."""
        if self.closed:
            return
        body = json.dumps(payload).encode() if isinstance(payload, dict) else payload
        self._outgoing += _HEADER.pack(kind, len(body))
        self._outgoing += body
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
        most = _READ_BYTES if self._unauthenticated is None else min(_READ_BYTES, max(self._unauthenticated.values()))
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
        while len(self._incoming) >= _HEADER.size:
            kind, size = _HEADER.unpack_from(self._incoming)
            # Checked for each frame: the caller may have authenticated the peer by the previous one.
            if self._unauthenticated is not None and size > self._unauthenticated.get(kind, -1):
                self.is_impostor = True
                self.close()
                return
            end = _HEADER.size + size
            if end > len(self._incoming):
                return
            payload = bytes(self._incoming[_HEADER.size : end])
            del self._incoming[:end]
            yield Kind(kind), payload

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._outgoing.clear()
            self.sock.close()


@dataclass(frozen=True)
class Address:
    """The launcher's address; its text in KERAS_DDL_LAUNCHER is `token@hostname@address,address:port`.

    `path`: the path of a UNIX socket instead of TCP; its text is `token@hostname@/path`.
    """

    token: str = field(repr=False)
    hostname: str
    addresses: tuple[str, ...] = ()
    port: int = 0
    path: str = ""

    def __str__(self) -> str:
        where = self.path or f"{','.join(self.addresses)}:{self.port}"
        return f"{self.token}@{self.hostname}@{where}"

    @classmethod
    def parse(cls, text: str) -> Address:
        try:
            token, hostname, where = text.split("@", 2)
            if where.startswith("/"):
                return cls(token, hostname, path=where)
            addresses, port = where.rsplit(":", 1)
            return cls(token, hostname, tuple(addresses.split(",")), int(port))
        except ValueError:
            raise LaunchError(
                "KERAS_DDL_LAUNCHER must be 'token@hostname@address,...:port' or 'token@hostname@/path'. `keras-ddl "
                "run` sets it for the processes that it starts; it is not meant for users. Unset it."
            ) from None


def listen(path: Path | None) -> tuple[socket.socket, Address]:
    """Opens the launcher's socket.

    `path`: a UNIX socket, in a directory that only the user can read; None: a port on all interfaces, for other hosts.
    """
    token, hostname = secrets.token_hex(32), socket.gethostname()
    if path is not None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with short_path(path) as name:
            sock.bind(name)
        address = Address(token, hostname, path=str(path))
    else:
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        sock.bind(("0.0.0.0", 0))
        address = Address(token, hostname, ("127.0.0.1", *_interface_addresses(sock)), sock.getsockname()[1])
    sock.listen(1024)
    sock.setblocking(False)
    return sock, address


@contextlib.contextmanager
def short_path(path: Path) -> Iterator[str]:
    """Yields a short path to the socket, through its directory's descriptor: names of UNIX sockets have at most 107
    bytes, and TMPDIR may be longer."""
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)


def _interface_addresses(sock: socket.socket) -> list[str]:
    addresses = []
    for _, name in socket.if_nameindex():
        try:
            reply = fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:  # an interface without an IPv4 address
            continue
        address = socket.inet_ntoa(reply[20:24])
        if not address.startswith("127.") and address not in addresses:
            addresses.append(address)
    return addresses


def connect(address: Address, *, timeout: float = 30.0) -> socket.socket:
    """Connects a rank to the first of the launcher's addresses that answers.

    Raises: LaunchError: no address answers within `timeout` seconds; or the UNIX socket does not exist.
    """
    if address.path:
        return _connect_here(Path(address.path))
    # On another host, 127.0.0.1 is that host.
    here = address.hostname == socket.gethostname()
    candidates = [a for a in address.addresses if here or not a.startswith("127.")] or list(address.addresses)
    deadline = time.monotonic() + timeout
    problems: dict[str, str] = {}
    while True:
        for candidate in candidates:
            try:
                return socket.create_connection((candidate, address.port), timeout=5)
            except OSError as error:
                problems[candidate] = str(error)
        if time.monotonic() > deadline:
            raise LaunchError(
                f"Every rank must be able to open a TCP connection to the launcher on {address.hostname}, port "
                f"{address.port}. Received, on host {socket.gethostname()} (pid {os.getpid()}): {problems}. "
                "Allow connections between the hosts (MPI needs them too)."
            )
        time.sleep(0.2)


def _connect_here(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with short_path(path) as name:
            sock.connect(name)
    except OSError as error:
        sock.close()
        raise LaunchError(f"The launcher must be running while its ranks start. Received: {path}: {error}.") from None
    return sock
