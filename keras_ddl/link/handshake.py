"""The handshake of two processes of a job: each proves that it knows the job's secret.

The listener sends a nonce first (NONCE). The caller answers with its own nonce and facts about itself (HELLO), and the
listener with the facts that the caller needs (WELCOME). Each proof is an HMAC over the other side's nonce and the
message. So nobody else can read a rank's output or start a program through a port, and a rank runs nothing for an
impostor. No message is parsed before its proof is checked.
"""

from __future__ import annotations

import hmac
import json
import os
import socket
import time
from collections.abc import Callable
from typing import Any

from keras_ddl.link.channel import Channel
from keras_ddl.link.kinds import FROM_UNPROVEN_LISTENER, NONCE_BYTES, Kind

_PROOF_BYTES = 32
_AGAIN_SECONDS = 0.05


class Impostor(Exception):
    """The listener does not know the job's secret."""


def introduce(
    connect: Callable[[], socket.socket], secret: str, hello: Callable[[], dict[str, Any]], seconds: float
) -> tuple[Channel, dict[str, Any]]:
    """Connects, and returns the connection and the listener's message once both sides have proved themselves.

    Args:
        connect: opens a connection; called again if the listener closes it, for example because too many strangers
            connect.
        hello: returns the facts about this process for the listener.
        seconds: time limit.
    Raises: Impostor. OSError, or the error of `connect`: nobody listens, or nobody answers in time.
    """
    until = time.monotonic() + seconds
    while True:
        channel = Channel(connect(), FROM_UNPROVEN_LISTENER)
        own_nonce = os.urandom(NONCE_BYTES)
        try:
            _, nonce = channel.receive(until)
            message = {**hello(), "nonce": own_nonce.hex()}
            channel.send(Kind.HELLO, sign(secret, "caller", nonce, message))
            kind, payload = channel.receive(until)
        except ConnectionError:
            if channel.is_impostor:
                raise Impostor from None
            if time.monotonic() >= until:
                raise
            time.sleep(_AGAIN_SECONDS)
            continue
        except BaseException:
            channel.close()
            raise
        answer = verify(secret, "listener", own_nonce, payload) if kind is Kind.WELCOME else None
        if answer is None:
            channel.close()
            raise Impostor
        channel.accept_all()
        return channel, answer


def sign(secret: str, side: str, nonce: bytes, message: dict[str, Any]) -> bytes:
    """Returns the payload of HELLO (`side` "caller") or WELCOME ("listener"), for the other side's `nonce`."""
    body = json.dumps(message).encode()
    return _proof(secret, side, nonce, body) + body


def verify(secret: str, side: str, nonce: bytes, payload: bytes) -> dict[str, Any] | None:
    """Returns the message of a HELLO or WELCOME; None, without parsing it, when `side` does not know the secret."""
    received, body = payload[:_PROOF_BYTES], payload[_PROOF_BYTES:]
    if not hmac.compare_digest(received, _proof(secret, side, nonce, body)):
        return None
    return json.loads(body)


def _proof(secret: str, side: str, nonce: bytes, body: bytes) -> bytes:
    assert secret, "an empty key proves nothing"
    # All nonces have the same length, so nobody can shift bytes between the nonce and the body.
    return hmac.digest(bytes.fromhex(secret), side.encode() + b"\0" + nonce + body, "sha256")
