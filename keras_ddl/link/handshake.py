"""The handshake of the launcher and a rank's wrapper: each proves that it knows the job's token.

The launcher sends a nonce first. Each side's proof is an HMAC over the other's nonce and its own first message. So
nobody else can read a rank's output or start a program through this port, and a rank runs nothing for an impostor. No
message is parsed before its proof.
"""

from __future__ import annotations

import hmac
import json
from typing import Any

_PROOF_BYTES = 32


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
