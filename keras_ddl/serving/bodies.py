"""How compressed bodies of HTTP requests are unpacked."""

from __future__ import annotations

import zlib

from keras_ddl.serving.status import invalid, too_large

# Content-Encoding -> zlib's number for what may come: gzip or zlib, as browsers and curl send it.
_WINDOWS = {"gzip": 31, "x-gzip": 31, "deflate": 15}


def inflated(body: bytes, encoding: str, limit: int) -> bytes:
    """Returns what a compressed body unpacks to.

    Raises: RequestError: INVALID_ARGUMENT: it is cut off, false, or of an encoding that is not known;
        RESOURCE_EXHAUSTED: it unpacks to more than `limit` bytes.
    """
    if encoding not in _WINDOWS:
        raise invalid(f"Content-Encoding must be one of {sorted(_WINDOWS)}. Received: {encoding[:50]!r}.")
    unpacker = zlib.decompressobj(_WINDOWS[encoding])
    try:
        found = unpacker.decompress(body, limit + 1)
    except zlib.error as error:
        raise invalid(f"The body is not {encoding}: {error}") from None
    if len(found) > limit:
        raise too_large(limit)
    if not unpacker.eof or unpacker.unused_data:
        raise invalid(f"The body is not {encoding}: it is cut off, or goes on after its end.")
    return found
