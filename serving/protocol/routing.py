"""Finds which model a gRPC message is for, and encodes the few small responses that the server sends itself.

It does not import TensorFlow. The cost does not grow with the message, because it reads only the first fields and skips
their contents by length. Source: https://protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from google.protobuf.message import DecodeError

from keras_ddl.serving.protocol import messages
from keras_ddl.serving.protocol.status import Code, RequestError, invalid

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MOST_FIELDS = 200  # that are read per message
_MOST_BYTES = 4096  # in all parts of a ModelSpec


def spec_of(data: bytes, *, in_task: bool = False) -> Any:
    """Returns the ModelSpec of a request, which is its field 1.

    Args:
        in_task: return field 1 of the request's first InferenceTask instead.
    Raises: RequestError: INVALID_ARGUMENT: the ModelSpec is missing or malformed.
    """
    parts = field_1(data)
    if in_task:
        if not parts:
            raise invalid("Inference request must contain at least one task.")
        parts = field_1(parts[0])
    try:
        if sum(map(len, parts)) > _MOST_BYTES:
            raise DecodeError
        spec = messages.message("ModelSpec").FromString(b"".join(parts))  # parts of a message are merged
    except DecodeError:
        raise invalid(
            f"The model_spec of a request must have at most {_MOST_BYTES} bytes, and be well-formed."
        ) from None
    if not spec.name:
        raise invalid("The request does not name a model (model_spec.name).")
    return spec


def field_1(message: bytes | memoryview) -> list[memoryview]:
    """Returns the contents of each length-delimited field 1 among the first fields."""
    return [value for number, value in _fields(memoryview(message)) if number == 1]


def _fields(message: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Yields (number, contents) of each length-delimited field among the first fields of a well-formed message."""
    position, end = 0, len(message)
    for _ in range(_MOST_FIELDS):
        if position >= end:
            return
        key, position = _varint(message, position)
        size = {_VARINT: 0, _FIXED64: 8, _FIXED32: 4}.get(key & 7)
        if key & 7 in (_VARINT, _BYTES):
            value, position = _varint(message, position)
            size = value if key & 7 == _BYTES else 0
        if size is None or position + size > end:
            return
        if key & 7 == _BYTES:
            yield key >> 3, message[position : position + size]
        position += size


def _varint(message: memoryview, position: int) -> tuple[int, int]:
    """Returns a varint and the position after it; for an unterminated one, 0 and the end of the message."""
    value = 0
    for shift, byte in enumerate(message[position : position + 10]):
        value |= (byte & 0x7F) << 7 * shift
        if byte < 0x80:
            return value, position + shift + 1
    return 0, len(message)


def status_response(versions: Sequence[Any]) -> bytes:
    """Returns a GetModelStatusResponse of the versions of a model (model_manager.Version)."""
    response = b""
    for each in versions:
        code = Code.UNKNOWN if each.error else Code.OK
        response += _text(1, _number(1, each.number) + _number(2, each.state) + _text(3, status(code, each.error)))
    return response


def reload_response(error: RequestError | None) -> bytes:
    return _text(1, status(error.code, error.message)) if error is not None else b""


def status(code: int, message: str) -> bytes:
    return _number(1, code) + _text(2, message.encode(errors="replace"))


def _number(field: int, value: int) -> bytes:
    return encoded(field << 3 | _VARINT) + encoded(value)


def _text(field: int, value: bytes) -> bytes:
    return encoded(field << 3 | _BYTES) + encoded(len(value)) + value


def encoded(value: int) -> bytes:
    """Encodes a number from 0 to 2^64 - 1 as a varint."""
    varint = bytearray()
    while value > 0x7F:
        varint.append(value & 0x7F | 0x80)
        value >>= 7
    varint.append(value)
    return bytes(varint)
