"""The launcher's socket, and its address, which every rank's wrapper gets in KERAS_DDL_LAUNCHER.

It is a UNIX socket in the job's private directory if all ranks are on the launcher's host, else TCP.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import socket
import struct
import time
from dataclasses import dataclass, field
from pathlib import Path

from keras_ddl.errors import LaunchError
from keras_ddl.link.connections import connect_here, listen_here

_SIOCGIFADDR = 0x8915


@dataclass(frozen=True)
class Address:
    """The launcher's address; its text in KERAS_DDL_LAUNCHER is `token@hostname@address,address:port`.

    `path`: the path of a UNIX socket, used instead of TCP; the text is then `token@hostname@/path`.
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
        return listen_here(path), Address(token, hostname, path=str(path))
    sock = socket.create_server(("0.0.0.0", 0), backlog=1024)
    sock.setblocking(False)
    return sock, Address(token, hostname, ("127.0.0.1", *_interface_addresses(sock)), sock.getsockname()[1])


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
        try:
            return connect_here(Path(address.path))
        except OSError as error:
            raise LaunchError(
                f"The launcher must be running while its ranks start. Received: {address.path}: {error}."
            ) from None
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
