"""Decompresses requests: HTTP bodies, and gRPC messages, which gRPC's server passes on as they arrive.

Only a model's process decompresses a whole request; the process that clients connect to reads at most its beginning.
"""

from __future__ import annotations

import zlib

from keras_ddl.serving.protocol.status import RequestError, invalid, too_large

# Content-Encoding -> zlib's `wbits`.
_WINDOWS = {"gzip": 31, "x-gzip": 31, "deflate": 15}
_BEGINNING = 2**16  # bytes, both compressed and decompressed
IDENTITY = "identity"


def encoding_of(message: bytes) -> str:
    """Returns the Content-Encoding of a gRPC message from its first bytes, because gRPC's server does not tell it.

    All fields of all requests are length-delimited, so the lowest three bits of an uncompressed request's first byte
    are 2. In gzip they are 7, in deflate 0.
    """
    if message[:2] == b"\x1f\x8b":
        return "gzip"
    if len(message) >= 2 and message[0] & 0x0F == 8 and int.from_bytes(message[:2]) % 31 == 0:  # RFC 1950
        return "deflate"
    return IDENTITY


def beginning(body: bytes, encoding: str) -> bytes:
    """Decompresses the first 64 KB of a body, and returns at most 64 KB of the result. Other bodies stay unchanged.

    Raises: RequestError: INVALID_ARGUMENT: the body is invalid.
    """
    if encoding == IDENTITY:
        return body
    try:
        return zlib.decompressobj(_WINDOWS[encoding]).decompress(body[:_BEGINNING], _BEGINNING)
    except zlib.error as error:
        raise _malformed(encoding, error) from None


def inflated(body: bytes, encoding: str, limit: int) -> bytes:
    """Returns the decompressed body. An uncompressed body stays as it is.

    Raises: RequestError: INVALID_ARGUMENT: the body is truncated or invalid, or the encoding unknown;
        RESOURCE_EXHAUSTED: it decompresses to more than `limit` bytes.
    """
    if encoding == IDENTITY:
        return body
    if encoding not in _WINDOWS:
        raise invalid(f"Content-Encoding must be one of {sorted(_WINDOWS)}. Received: {encoding[:50]!r}.")
    unpacker = zlib.decompressobj(_WINDOWS[encoding])
    try:
        data = unpacker.decompress(body, limit + 1)
    except zlib.error as error:
        raise _malformed(encoding, error) from None
    if len(data) > limit:
        raise too_large(limit)
    if not unpacker.eof or unpacker.unused_data:
        raise invalid(f"The body is not {encoding}: it is truncated, or has data after its end.")
    return data


def _malformed(encoding: str, error: zlib.error) -> RequestError:
    return invalid(f"The body is not {encoding}: {error}")
