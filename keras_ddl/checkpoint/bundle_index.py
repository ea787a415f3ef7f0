"""Reads the index of a TensorFlow bundle: which boxes of each tensor its data files have.

TensorFlow itself reports only shapes. The index is an uncompressed table in LevelDB's format: blocks of entries, the
last of which lists the others (tensorflow/core/lib/io/format.cc). Its values are BundleEntryProtos; a tensor that was
written in parts has one that lists the parts.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from keras_ddl.cut.values.layouts import Box

_FOOTER = 48  # bytes: two handles, padding, and a magic number
_MAGIC = 0xDB4775248B80FB57
_HEADER = b""  # the key of the bundle's own entry


def stored_boxes(prefix: str) -> dict[str, list[Box]]:
    """Returns key -> the boxes that are stored. Raises: OSError: the index is missing or is not an index."""
    from google.protobuf.message import DecodeError
    from tensorflow.core.protobuf import tensor_bundle_pb2

    data = Path(f"{prefix}.index").read_bytes()
    boxes: dict[str, list[Box]] = {}
    try:
        for key, value in _entries(data):
            if key == _HEADER or key.startswith(b"\0"):  # more entries, for parts, by number
                continue
            entry = tensor_bundle_pb2.BundleEntryProto.FromString(value)
            shape = [each.size for each in entry.shape.dim]
            parts = [list(zip(part.extent, shape)) for part in entry.slices]
            boxes[key.decode()] = [
                tuple((each.start, each.length if each.HasField("length") else extent) for each, extent in part)
                for part in parts
            ] or [tuple((0, extent) for extent in shape)]
    except (struct.error, IndexError, ValueError, DecodeError) as error:
        raise OSError(f"not an index of a bundle: {error}") from error
    return boxes


def _entries(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yields the keys and values of a table."""
    footer = data[-_FOOTER:]
    if struct.unpack("<Q", footer[-8:])[0] != _MAGIC:
        raise ValueError("no magic number at its end")
    _, _, place = _handle(footer, 0)  # of a block that says nothing
    for _, handle in _block(data, *_handle(footer, place)[:2]):
        yield from _block(data, *_handle(handle, 0)[:2])


def _block(data: bytes, begin: int, size: int) -> Iterator[tuple[bytes, bytes]]:
    """Yields the entries of a block. A key shares its first bytes with the previous key."""
    if data[begin + size]:
        raise ValueError("a block is compressed")
    restarts = struct.unpack("<I", data[begin + size - 4 : begin + size])[0]
    place, end, key = begin, begin + size - 4 * (restarts + 1), b""
    while place < end:
        shared, place = _number(data, place)
        own, place = _number(data, place)
        length, place = _number(data, place)
        key = key[:shared] + data[place : place + own]
        yield key, data[place + own : place + own + length]
        place += own + length


def _handle(data: bytes, place: int) -> tuple[int, int, int]:
    """Returns where a block begins, its size, and where its handle ends."""
    begin, place = _number(data, place)
    size, place = _number(data, place)
    return begin, size, place


def _number(data: bytes, place: int) -> tuple[int, int]:
    """Returns an integer of seven bits per byte, and where it ends."""
    number = shift = 0
    while True:
        byte = data[place]
        number, shift, place = number | (byte & 127) << shift, shift + 7, place + 1
        if byte < 128:
            return number, place
