"""How the server and its processes talk over a socket: frames of a head, a JSON object and a body of bytes."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

HEAD = struct.Struct("<QIQ")  # number of the call, bytes of the object, bytes of the body


class Frame(NamedTuple):
    """A message. `fields`: the JSON object."""

    number: int
    fields: dict[str, Any]
    body: bytes | bytearray


def head_of(number: int, fields: Mapping[str, Any], size: int) -> bytes:
    """Returns what stands before a body of `size` bytes."""
    text = json.dumps(fields).encode()
    return HEAD.pack(number, len(text), size) + text


def send(to: socket.socket, number: int, fields: Mapping[str, Any], body: bytes | bytearray | memoryview = b"") -> None:
    """Sends a frame over a blocking socket."""
    head = head_of(number, fields, len(body))
    if len(body) < 2**16:
        to.sendall(head + body)
    else:
        to.sendall(head)
        to.sendall(body)


def receive(of: socket.socket) -> Frame | None:
    """Returns the next frame of a blocking socket; None: the other side has closed it."""
    head = _exactly(of, HEAD.size)
    if head is None:
        return None
    number, fields_size, body_size = HEAD.unpack(head)
    rest = _exactly(of, fields_size + body_size)
    if rest is None:
        return None
    fields = json.loads(bytes(rest[:fields_size]))
    return Frame(number, fields, bytes(memoryview(rest)[fields_size:]))


def _exactly(of: socket.socket, size: int) -> bytearray | None:
    found = bytearray(size)
    view, position = memoryview(found), 0
    while position < size:
        count = of.recv_into(view[position:])
        if not count:
            return None
        position += count
    return found
