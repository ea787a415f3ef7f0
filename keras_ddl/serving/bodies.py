"""Decompresses bodies of HTTP requests."""

from __future__ import annotations

import zlib

from keras_ddl.serving.status import invalid, too_large

# Content-Encoding -> zlib's `wbits`.
_WINDOWS = {"gzip": 31, "x-gzip": 31, "deflate": 15}


def inflated(body: bytes, encoding: str, limit: int) -> bytes:
    """Returns the decompressed body.

    Raises: RequestError: INVALID_ARGUMENT: the body is truncated or invalid, or the encoding unknown;
        RESOURCE_EXHAUSTED: it decompresses to more than `limit` bytes.
    """
    if encoding not in _WINDOWS:
        raise invalid(f"Content-Encoding must be one of {sorted(_WINDOWS)}. Received: {encoding[:50]!r}.")
    unpacker = zlib.decompressobj(_WINDOWS[encoding])
    try:
        data = unpacker.decompress(body, limit + 1)
    except zlib.error as error:
        raise invalid(f"The body is not {encoding}: {error}") from None
    if len(data) > limit:
        raise too_large(limit)
    if not unpacker.eof or unpacker.unused_data:
        raise invalid(f"The body is not {encoding}: it is truncated, or has data after its end.")
    return data
