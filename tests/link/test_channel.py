"""Frames on a stream between two ends in one process."""

from __future__ import annotations

import select
import socket
import struct
import time

import pytest

from harness.waiting import LIMIT_SECONDS
from keras_ddl.link.channel import Channel, encoded
from keras_ddl.link.kinds import FROM_UNPROVEN_CALLER, FROM_UNPROVEN_LISTENER, Kind


def connected() -> tuple[Channel, Channel]:
    """Returns the caller's end and the listener's end."""
    ours, theirs = socket.socketpair()
    return Channel(ours, FROM_UNPROVEN_LISTENER), Channel(theirs, FROM_UNPROVEN_CALLER)


@pytest.mark.parametrize(
    ("kind", "size", "closes"),
    [
        (Kind.HELLO, FROM_UNPROVEN_CALLER[Kind.HELLO], False),
        (Kind.HELLO, FROM_UNPROVEN_CALLER[Kind.HELLO] + 1, True),
        (Kind.OUT, 1, True),
        (Kind.STOP, 0, True),
        (99, 0, True),
    ],
)
def test_channel_closes_at_the_header_of_a_forbidden_frame(kind: int, size: int, closes: bool):
    ours, theirs = connected()
    ours.sock.sendall(struct.pack("!BQ", kind, size))
    select.select([theirs], [], [], LIMIT_SECONDS)
    assert list(theirs.read()) == [] and theirs.closed == closes
    ours.close()
    theirs.close()


def test_channel_carries_frames_of_any_size():
    ours, theirs = connected()
    theirs.accept_all()
    big = bytes(5_000_000)
    for kind, payload in ((Kind.OUT, b""), (Kind.RESULT, big), (Kind.EXIT, {"status": 1})):
        ours.send(kind, payload)
    frames = []
    while len(frames) < 3:
        ours.write()
        frames += theirs.read()
    assert frames == [(Kind.OUT, b""), (Kind.RESULT, big), (Kind.EXIT, b'{"status": 1}')]
    ours.close()
    assert list(theirs.read()) == [] and theirs.closed


def test_channel_with_a_stranger_reads_no_byte_beyond_a_frame():
    ours, theirs = connected()
    theirs.sock.sendall(encoded(Kind.NONCE, b"n" * 32) + encoded(Kind.WELCOME, b"w") + b"of the next reader")
    until = time.monotonic() + LIMIT_SECONDS
    assert [ours.receive(until), ours.receive(until)] == [(Kind.NONCE, b"n" * 32), (Kind.WELCOME, b"w")]
    assert ours.sock.recv(100) == b"of the next reader"
    with pytest.raises(TimeoutError):
        ours.receive(time.monotonic() + 0.01)
    theirs.close()
    with pytest.raises(ConnectionError):
        ours.receive(until)
