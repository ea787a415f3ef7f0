"""The protocol between the server and its model processes: frames of a head, a JSON object and a body of bytes."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping
from typing import Any, BinaryIO, NamedTuple

HEAD = struct.Struct("<QIQ")  # number of the call, bytes of the object, bytes of the body


class Frame(NamedTuple):
    """A message. `fields`: the JSON object."""

    number: int
    fields: dict[str, Any]
    body: bytes


def head_of(number: int, fields: Mapping[str, Any], size: int) -> bytes:
    """Returns the part of a frame before a body of `size` bytes."""
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


def receive(stream: BinaryIO) -> Frame | None:
    """Returns the next frame; None: the other side has closed the connection."""
    head = stream.read(HEAD.size)
    if len(head) < HEAD.size:
        return None
    number, fields_size, body_size = HEAD.unpack(head)
    fields, body = stream.read(fields_size), stream.read(body_size)
    return Frame(number, json.loads(fields), body) if len(body) == body_size else None
