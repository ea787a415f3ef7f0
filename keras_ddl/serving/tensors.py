"""Tensors of gRPC's messages, to and from arrays: checked before anything is unpacked, because clients are not trusted.

Messages are read and written field by field (wire.py), so that numbers go from the message into an array, and back,
without a copy of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from tensorflow.core.framework import tensor_pb2

from keras_ddl.serving import dtypes, wire
from keras_ddl.serving.limits import Unpacked
from keras_ddl.serving.servable import Signature
from keras_ddl.serving.status import invalid

_HEADER_BYTES = 4096  # dtype and shape
_CONTENT, _STRINGS, _HALF, _FLOAT8 = 4, 8, 13, 18
# Fields of numbers as they stand in a message: field -> dtype, little endian.
_FIXED = {5: "<f4", 6: "<f8", 9: "<f4", 12: "<f8"}
_VARINTS = {7: "<i4", 10: "<i8", 11: "<u8", _HALF: "<u2", 16: "<u4", 17: "<u8"}
# Which field holds the values of a dtype (by number), where it is not `tensor_content`.
_FIELD_OF = {
    1: 5,
    2: 6,
    8: 9,
    18: 12,
    9: 10,
    10: 11,
    22: 16,
    23: 17,
    dtypes.STRING: _STRINGS,
    **dict.fromkeys((3, 4, 5, 6, 17), 7),
    **dict.fromkeys((14, 19), _HALF),
    **dict.fromkeys((24, 25), _FLOAT8),
}
_BYTES_FIELDS = {_CONTENT, _STRINGS, _FLOAT8}
_ALL = {*_FIXED, *_VARINTS, *_BYTES_FIELDS}


@dataclass
class Tensor:
    """A TensorProto that is not unpacked: dtype (a number), shape, and the pieces of the message with its values."""

    dtype: int
    shape: list[int]
    values: list[tuple[int, int, memoryview]] = field(default_factory=list)


def tensor_of(alias: str, message: memoryview, unpacked: Unpacked) -> Tensor:
    """Returns what a TensorProto says of itself.

    Raises: RequestError: INVALID_ARGUMENT: it is malformed, of a dtype that there is not, or has unknown dimensions.
    """
    rest, values = wire.split(message, _is_value, _HEADER_BYTES, unpacked.add_field)
    try:
        header = tensor_pb2.TensorProto.FromString(rest)
    except DecodeError as error:
        raise invalid(f"Input {alias!r} is malformed: {error}") from None
    shape = [dimension.size for dimension in header.tensor_shape.dim]
    if header.tensor_shape.unknown_rank or any(size < 0 for size in shape):
        raise invalid(f"Input {alias!r}: the shape of a tensor must have no unknown dimension. Received: {shape}.")
    if not dtypes.is_known(header.dtype):
        raise invalid(f"Input {alias!r}: there is no dtype {header.dtype}.")
    return Tensor(header.dtype, shape, values)


def _is_value(number: int, kind: int) -> bool:
    if kind == wire.BYTES:  # strings, or packed numbers
        return number in _ALL
    return (number in _VARINTS and kind == wire.VARINT) or (
        number in _FIXED and kind == (wire.FIXED32 if _FIXED[number] == "<f4" else wire.FIXED64)
    )


def array_of(alias: str, tensor: Tensor, unpacked: Unpacked) -> np.ndarray:
    """Returns a tensor as an array; as TensorFlow does, what is missing at the end repeats the last value.

    The array may be a view of the message.

    Raises: RequestError: INVALID_ARGUMENT: values that do not fill the shape; RESOURCE_EXHAUSTED: above the limit.
    """
    count = math.prod(tensor.shape)
    if tensor.dtype == dtypes.STRING:
        return _strings(alias, tensor, count, unpacked)
    dtype = dtypes.numpy_dtype(tensor.dtype)
    unpacked.add(count * dtype.itemsize)
    content = next((value for number, _, value in reversed(tensor.values) if number == _CONTENT), b"")
    if len(content):
        if len(content) != count * dtype.itemsize:
            raise invalid(f"Input {alias!r}: {len(content)} bytes of content do not fill the shape {tensor.shape}.")
        if dtype == np.bool_:  # any other byte than 0 is true
            return (np.frombuffer(content, np.uint8) != 0).reshape(tensor.shape)
        return np.frombuffer(content, dtype).reshape(tensor.shape)
    found = _numbers(tensor, dtype, count)
    if found.size > count:
        raise invalid(f"Input {alias!r} of shape {tensor.shape} has {found.size} values.")
    if found.size < count:
        filled = np.full(count, found[-1] if found.size else 0, dtype)
        filled[: found.size] = found
        found = filled
    return found.reshape(tensor.shape)


def _numbers(tensor: Tensor, dtype: np.dtype, count: int) -> np.ndarray:
    number = _FIELD_OF[tensor.dtype]
    parts = [value for each, _, value in tensor.values if each == number]
    joined = parts[0] if len(parts) == 1 else memoryview(b"".join(parts))
    if number == _FLOAT8:
        return np.frombuffer(joined, dtype)
    if number in _FIXED:
        stored = np.dtype(_FIXED[number])
        if len(joined) % stored.itemsize:
            raise invalid("The message is malformed: packed numbers end in the middle of one.")
        found = np.frombuffer(joined, stored)
        if dtype.kind == "c":
            return found[: found.size // 2 * 2].view(dtype)
        return found.astype(dtype, copy=False)
    raw = wire.packed_varints(joined, np.dtype(_VARINTS[number]), count)
    if dtype == np.bool_:
        return raw != 0
    return raw.view(dtype) if number == _HALF else raw.astype(dtype, copy=False)


def _strings(alias: str, tensor: Tensor, count: int, unpacked: Unpacked) -> np.ndarray:
    unpacked.add(16 * count)
    values = []
    for number, kind, value in tensor.values:
        if number == _STRINGS and kind == wire.BYTES:
            unpacked.add_string(len(value))
            values.append(bytes(value))
    if len(values) > count:
        raise invalid(f"Input {alias!r} of shape {tensor.shape} has {len(values)} values.")
    found = np.full(count, values[-1] if values else b"", dtype=object)
    found[: len(values)] = values
    return found.reshape(tensor.shape)


def field_of(number: int, array: np.ndarray, *, as_content: bool) -> list[bytes | memoryview]:
    """Returns, in pieces, an array as the TensorProto in field `number` of a message.

    Args:
        as_content: numbers stand in `tensor_content` (--enable_serialization_as_tensor_content), else in `float_val`
            and its like, as TensorFlow Serving has it.
    """
    dtype = dtypes.number_of(array)
    shape = b"".join(wire.encoded(2, wire.BYTES, wire.encoded(1, wire.VARINT, wire.varint(n))) for n in array.shape)
    parts: list[bytes | memoryview] = [
        wire.encoded(1, wire.VARINT, wire.varint(dtype)),
        wire.encoded(2, wire.BYTES, shape),
    ]
    if dtype == dtypes.STRING:
        for each in array.reshape(-1):
            parts += wire.pieces(_STRINGS, wire.BYTES, each if isinstance(each, bytes) else str(each).encode())
    elif array.size:
        values_field = _CONTENT if as_content else _FIELD_OF[dtype]
        parts += wire.pieces(values_field, wire.BYTES, _packed(array, values_field))
    size = sum(map(len, parts))
    return [wire.varint(number << 3 | wire.BYTES), wire.varint(size), *parts]


def _packed(array: np.ndarray, values_field: int) -> bytes | memoryview:
    array = np.ascontiguousarray(array)
    if values_field in _VARINTS and array.dtype != np.bool_:
        if array.dtype.itemsize == 2 and values_field == _HALF:
            array = array.view(np.uint16)
        return _packed_varints(array)
    return memoryview(array.reshape(-1).view(np.uint8))


def _packed_varints(array: np.ndarray) -> bytes:
    """Packs numbers by google.protobuf: it has a loop in C."""
    kinds: dict[str, Callable[[Any], Any]] = {
        "i": lambda values: tensor_pb2.TensorProto(int64_val=values),
        "u": lambda values: tensor_pb2.TensorProto(uint64_val=values),
    }
    packed = memoryview(kinds[array.dtype.kind](array.reshape(-1).tolist()).SerializeToString())
    return bytes(next(value for _, _, value in wire.fields(packed)))


def check(signature: Signature, given: Mapping[str, int]) -> None:
    """Sees to it that inputs are those of a signature.

    Shapes are the model's affair: TensorFlow Serving does not compare them with the signature's.

    Args:
        given: alias -> number of its dtype.
    Raises: RequestError: INVALID_ARGUMENT: too many, too few, or of another dtype.
    """
    missing = set(signature.inputs) - set(given) - set(signature.defaults)
    extra = set(given) - set(signature.inputs)
    if missing or extra:
        raise invalid(
            f"Inputs do not match those of signature {signature.name!r}. Sent extra: {sorted(extra)[:10]}. "
            f"Missing but required: {sorted(missing)}. It takes {sorted(signature.inputs)}."
        )
    for alias, number in given.items():
        wanted = signature.inputs[alias].dtype
        if number != wanted:
            raise invalid(f"Input {alias!r} must be of dtype {dtypes.name(wanted)}. Received: {dtypes.name(number)}.")


def with_defaults(signature: Signature, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns an array for each input of a signature, by alias, in its order."""
    return {alias: arrays[alias] if alias in arrays else signature.defaults[alias] for alias in signature.inputs}


def outputs_of(signature: Signature, wanted: Sequence[str]) -> list[str]:
    """Returns the requested outputs, by default all, in the signature's order.

    Raises: RequestError: INVALID_ARGUMENT: one that there is not, or the same twice.
    """
    wanted = list(wanted)
    unknown = [alias for alias in wanted if alias not in signature.outputs]
    if unknown:
        raise invalid(
            f"output tensor alias not found in signature: {unknown[0][:100]} Outputs expected to be in the set "
            f"{{{','.join(sorted(signature.outputs))}}}."
        )
    if len(set(wanted)) < len(wanted):
        raise invalid(f"duplicate output tensor alias in {wanted[:10]}")
    return [alias for alias in signature.outputs if alias in wanted or not wanted]
