"""The wire format of protocol buffers, read field by field without unpacking anything.

Source: https://protobuf.dev/programming-guides/encoding. google.protobuf parses a whole message before anybody can look
at it, and 64 MB of it may become gigabytes. What is large in a request (tensors, examples) is found here as pieces of
the message as it arrived; what is small is left to google.protobuf.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from keras_ddl.serving.status import invalid

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
_VARINT_BYTES = 10
_PIECE = 2**20  # bytes of packed numbers that are decoded at a time


def fields(message: memoryview) -> Iterator[tuple[int, int, memoryview]]:
    """Yields number, wire type and value of each field: the bytes of a number, the contents of what has a length.

    Cost: about a microsecond for each field; nothing is copied.
    Raises: RequestError: INVALID_ARGUMENT: it ends in the middle of a field, or has groups, which no message here has.
    """
    position, end = 0, len(message)
    while position < end:
        key, position = _varint(message, position)
        kind, begin = key & 7, position
        if kind == VARINT:
            _, position = _varint(message, position)
        elif kind == BYTES:
            size, begin = _varint(message, position)
            position = begin + size
        elif kind in (FIXED32, FIXED64):
            position += 4 if kind == FIXED32 else 8
        else:
            raise invalid(f"The message is malformed: wire type {kind} at byte {begin}.")
        if position > end or not 0 < key >> 3 < 2**29:
            raise invalid(f"The message is malformed: field {key >> 3} at byte {begin} does not fit.")
        yield key >> 3, kind, message[begin:position]


def split(
    message: memoryview, take: Callable[[int, int], bool], limit: int, count: Callable[[], None]
) -> tuple[bytes, list[tuple[int, int, memoryview]]]:
    """Returns the fields that are not taken as a message of their own, and those that are.

    Args:
        take: of a field's number and wire type. Fields of another wire type than theirs are unknown to google.protobuf.
        limit: bytes of the former.
        count: called for each of the latter; it may raise.
    Raises: RequestError: INVALID_ARGUMENT: as `fields`, or there are more bytes than `limit`.
    """
    rest, taken, size = [], [], 0
    for number, kind, value in fields(message):
        if take(number, kind):
            count()
            taken.append((number, kind, value))
            continue
        field = encoded(number, kind, value)
        size += len(field)
        if size > limit:
            raise invalid(f"The message has more than {limit} bytes beside its tensors.")
        rest.append(field)
    return b"".join(rest), taken


def encoded(number: int, kind: int, value: bytes | memoryview) -> bytes:
    """Returns a field as it stands in a message."""
    return b"".join(pieces(number, kind, value))


def pieces(number: int, kind: int, value: bytes | memoryview) -> Sequence[bytes | memoryview]:
    """Returns the parts of a field, the last of which is `value` itself."""
    key = varint(number << 3 | kind)
    return (key, varint(len(value)), value) if kind == BYTES else (key, value)


def varint(value: int) -> bytes:
    """Returns a number from 0 to 2^64 - 1 as a varint."""
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


def _varint(message: memoryview, position: int) -> tuple[int, int]:
    """Returns a varint and where it ends."""
    value = shift = 0
    for byte in message[position : position + _VARINT_BYTES]:
        value |= (byte & 0x7F) << shift
        position += 1
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, position
        shift += 7
    raise invalid("The message is malformed: a number does not end.")


def packed_varints(data: memoryview, dtype: np.dtype, most: int) -> np.ndarray:
    """Returns packed varints as numbers of `dtype`, which keeps their low bits as a cast in C does.

    Cost: memory for the result, and for a few pieces of it.
    Args:
        most: how many there may be.
    Raises: RequestError: INVALID_ARGUMENT: they are malformed, or more.
    """
    whole = np.frombuffer(data, np.uint8)
    if np.count_nonzero(whole < 0x80) > most:
        raise invalid(f"A tensor has more values than its shape: {most}.")
    if whole.size and whole[-1] >= 0x80:
        raise invalid("The message is malformed: a packed number does not end.")
    found, begin = [np.empty(0, dtype)], 0
    while begin < whole.size:
        end = min(begin + _PIECE, whole.size)
        while whole[end - 1] >= 0x80:
            end += 1
            if end - begin > _PIECE + _VARINT_BYTES:
                raise invalid("The message is malformed: a packed number has more than 10 bytes.")
        found.append(_decoded(whole[begin:end]).astype(dtype, copy=False))
        begin = end
    return np.concatenate(found)


def _decoded(data: np.ndarray) -> np.ndarray:
    ends = np.flatnonzero(data < 0x80)
    begins = np.concatenate([[0], ends[:-1] + 1])
    sizes = ends - begins + 1
    if sizes.max() > _VARINT_BYTES:
        raise invalid("The message is malformed: a packed number has more than 10 bytes.")
    found = np.zeros(len(ends), np.uint64)
    for place in range(int(sizes.max())):
        has = np.flatnonzero(sizes > place)
        found[has] |= (data[begins[has] + place] & np.uint64(0x7F)) << np.uint64(7 * place)
    return found
