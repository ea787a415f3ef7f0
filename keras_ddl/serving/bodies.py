"""How compressed bodies of HTTP requests are unpacked."""

from __future__ import annotations

import zlib

from keras_ddl.serving.status import invalid, too_large

_PIECE = 2**20
# Content-Encoding -> zlib's number for what may come: gzip or zlib, as browsers and curl send it.
_WINDOWS = {"gzip": 31, "x-gzip": 31, "deflate": 15}


def inflated(body: bytes, encoding: str, limit: int) -> bytes:
    """Returns what a compressed body unpacks to; never holds more than the limit.

    Raises: RequestError: INVALID_ARGUMENT: it is cut off, false, or of an encoding that is not known;
        RESOURCE_EXHAUSTED: it unpacks to more than `limit` bytes.
    """
    if encoding not in _WINDOWS:
        raise invalid(f"Content-Encoding must be one of {sorted(_WINDOWS)}. Received: {encoding[:50]!r}.")
    unpacker = zlib.decompressobj(_WINDOWS[encoding])
    found, rest = bytearray(), memoryview(body)
    try:
        while not unpacker.eof:
            data = unpacker.unconsumed_tail
            if not data:
                data, rest = rest[:_PIECE], rest[_PIECE:]
            piece = unpacker.decompress(data, _PIECE)
            if not piece and not len(data):
                raise invalid(f"The body is not {encoding}: it is cut off.")
            found += piece
            if len(found) > limit:
                raise too_large(limit)
    except zlib.error as error:
        raise invalid(f"The body is not {encoding}: {error}") from None
    if unpacker.unused_data or len(rest):
        raise invalid(f"The body is not {encoding}: it goes on after its end.")
    return bytes(found)
