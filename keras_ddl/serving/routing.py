"""Which model a message of gRPC is for, and the few small messages that the server reads and writes itself.

Nothing here imports TensorFlow, and nothing grows with a message: its first fields are looked at, and the contents of
what has a length are skipped. Source: https://protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from google.protobuf.message import DecodeError
from tensorflow_serving.apis import model_pb2

from keras_ddl.serving.status import Code, RequestError, invalid

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MOST_FIELDS = 200  # of a message that are looked at
_MOST_BYTES = 4096  # of a ModelSpec


def spec_of(data: bytes, *, in_task: bool = False) -> Any:
    """Returns the ModelSpec of a request, which is its field 1.

    Args:
        in_task: of its first InferenceTask, whose field 1 it is.
    Raises: RequestError: INVALID_ARGUMENT: there is none, or it is malformed.
    """
    parts = field_1(data)
    if in_task:
        if not parts:
            raise invalid("Inference request must contain at least one task.")
        parts = field_1(parts[0])
    found = b"".join(bytes(part[:_MOST_BYTES]) for part in parts[:4])
    try:
        spec = model_pb2.ModelSpec.FromString(found)
    except DecodeError:
        raise invalid(
            f"The model_spec of a request must have at most {_MOST_BYTES} bytes, and be well-formed."
        ) from None
    if not spec.name:
        raise invalid("The request does not name a model (model_spec.name).")
    return spec


def field_1(message: bytes | memoryview) -> list[memoryview]:
    """Returns the contents of field 1, where it has a length, as often as it stands among the first fields."""
    fields = itertools.islice(_fields(memoryview(message)), _MOST_FIELDS)
    return [value for number, value in fields if number == 1]


def _fields(message: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Yields number and contents of the fields that have a length, up to where the message is malformed."""
    position, end = 0, len(message)
    while position < end:
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
    """Returns a varint and where it ends; one that does not end is 0 at the end of the message."""
    value = 0
    for shift, byte in enumerate(message[position : position + 10]):
        value |= (byte & 0x7F) << 7 * shift
        if byte < 0x80:
            return value, position + shift + 1
    return 0, len(message)


def status_response(versions: Sequence[Any]) -> bytes:
    """Returns a GetModelStatusResponse of the versions of a model (model_manager.Version)."""
    found = b""
    for each in versions:
        code = Code.UNKNOWN if each.error else Code.OK
        found += _text(1, _number(1, each.number) + _number(2, each.state) + _text(3, status(code, each.error)))
    return found


def reload_response(error: RequestError | None) -> bytes:
    """Returns a ReloadConfigResponse."""
    return _text(1, status(error.code, error.message)) if error is not None else b""


def status(code: int, message: str) -> bytes:
    """Returns a StatusProto."""
    return _number(1, code) + _text(2, message.encode(errors="replace"))


def _number(field: int, value: int) -> bytes:
    return encoded(field << 3 | _VARINT) + encoded(value)


def _text(field: int, value: bytes) -> bytes:
    return encoded(field << 3 | _BYTES) + encoded(len(value)) + value


def encoded(value: int) -> bytes:
    """Returns a number from 0 to 2^64 - 1 as a varint."""
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)
