"""Tensors of messages, to and from arrays, and what a signature takes and gives."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tensorflow.core.framework import tensor_pb2

from keras_ddl.compat.tensorflow import tf
from keras_ddl.serving.memory import MEGABYTE
from keras_ddl.serving.routing import encoded
from keras_ddl.serving.servable import Signature
from keras_ddl.serving.status import Code, RequestError, invalid

MAX_RANK = 64  # of NumPy's arrays
_STRING, _BOOL = int(tf.string.as_datatype_enum), int(tf.bool.as_datatype_enum)
# dtype -> the field of a TensorProto that holds its values, where it is not `tensor_content`.
_FIELDS = {
    tf.float32: "float_val",
    tf.float64: "double_val",
    tf.complex64: "scomplex_val",
    tf.complex128: "dcomplex_val",
    tf.int64: "int64_val",
    tf.bool: "bool_val",
    tf.uint32: "uint32_val",
    tf.uint64: "uint64_val",
    tf.string: "string_val",
    **dict.fromkeys((tf.int32, tf.uint8, tf.int16, tf.int8, tf.uint16), "int_val"),
    **dict.fromkeys((tf.bfloat16, tf.float16), "half_val"),
}
_AS_IN_MEMORY = {"float_val": "<f4", "double_val": "<f8", "scomplex_val": "<f4", "dcomplex_val": "<f8"}


class Room:
    """What the arrays of one request may take together: the first word on what a message claims to hold.

    The last word has the system, which bounds what the process can allocate.
    """

    def __init__(self, limit: int) -> None:
        self._limit, self._used = limit, 0

    def take(self, size: int) -> None:
        """Raises: RequestError: RESOURCE_EXHAUSTED: there is less than `size` bytes left."""
        self._used += size
        if self._used > self._limit:
            raise RequestError(
                Code.RESOURCE_EXHAUSTED,
                f"The request is larger than the limit of {self._limit / MEGABYTE:g} MB after it is unpacked: its "
                f"inputs take {self._used} bytes or more. Send fewer rows, or start the server with a larger "
                "--max-message-mb.",
                http_status=413,
            )


def dtype_name(number: int) -> str:
    """Returns TensorFlow's name of a dtype."""
    try:
        return tf.as_dtype(number).name
    except TypeError:
        return f"number {number}"


def feeds_of(signature: Signature, inputs: Mapping[str, tensor_pb2.TensorProto], room: Room) -> dict[str, np.ndarray]:
    """Returns an array for each input that a request holds, by alias.

    Raises: RequestError: INVALID_ARGUMENT: they are not those of the signature; RESOURCE_EXHAUSTED.
    """
    check_names(signature, inputs)
    for alias, tensor in inputs.items():
        shape = [dimension.size for dimension in tensor.tensor_shape.dim]
        if tensor.tensor_shape.unknown_rank or any(size < 0 for size in shape):
            raise invalid(f"Input {alias!r}: the shape of a tensor must have no unknown dimension. Received: {shape}.")
        wanted = signature.inputs[alias].dtype
        if tensor.dtype != wanted:
            raise invalid(
                f"Input {alias!r} must be of dtype {dtype_name(wanted)}. Received: {dtype_name(tensor.dtype)}."
            )
        check_shape(signature, alias, shape)
    return {alias: _array_of(alias, tensor, room) for alias, tensor in inputs.items()}


def check_names(signature: Signature, given: Mapping[str, Any]) -> None:
    """Raises: RequestError: INVALID_ARGUMENT: there are more or fewer inputs than the signature takes."""
    missing = set(signature.inputs) - set(given) - set(signature.defaults)
    extra = set(given) - set(signature.inputs)
    if missing or extra:
        raise invalid(
            f"Inputs do not match those of signature {signature.name!r}. Sent extra: {sorted(extra)[:10]}. "
            f"Missing but required: {sorted(missing)}. It takes {sorted(signature.inputs)}."
        )


def check_shape(signature: Signature, alias: str, shape: Sequence[int]) -> None:
    """Compares a shape with the rank and the extents that a signature knows of an input.

    Operations of TensorFlow check a rank by ending the process.

    Raises: RequestError: INVALID_ARGUMENT: it does not fit, or no array can have it.
    """
    if len(shape) > MAX_RANK or math.prod(filter(None, shape)) >= 2**63:
        shown = f"{len(shape)} dimensions" if len(shape) > MAX_RANK else list(shape)
        raise invalid(
            f"Input {alias!r}: a tensor has at most {MAX_RANK} dimensions and 2^63 elements. Received: {shown}."
        )
    known = signature.shapes[alias]
    if known is None:
        return
    fits = len(known) == len(shape) and all(a in (-1, b) for a, b in zip(known, shape))
    if not fits:
        wanted = [None if size == -1 else size for size in known]
        raise invalid(
            f"Input {alias!r} of signature {signature.name!r} must have shape {wanted}. Received: {list(shape)}."
        )


def _array_of(alias: str, tensor: tensor_pb2.TensorProto, room: Room) -> np.ndarray:
    """Returns a tensor as an array; as TensorFlow does, what is missing at the end repeats the last value."""
    shape = [dimension.size for dimension in tensor.tensor_shape.dim]
    count = math.prod(shape)
    dtype = np.dtype(tf.as_dtype(tensor.dtype).as_numpy_dtype)
    room.take(count * (16 if tensor.dtype == _STRING else dtype.itemsize))
    if tensor.tensor_content and tensor.dtype != _STRING:
        content = tensor.tensor_content
        if len(content) != count * dtype.itemsize:
            raise invalid(f"Input {alias!r}: {len(content)} bytes of content do not fill the shape {shape}.")
        if tensor.dtype == _BOOL:  # any other byte than 0 is true
            return (np.frombuffer(content, np.uint8) != 0).reshape(shape)
        return np.frombuffer(content, dtype).reshape(shape)
    values = _values(tensor, dtype)
    if values.size > count:
        raise invalid(f"Input {alias!r} of shape {shape} has {values.size} values.")
    if values.dtype.hasobject:
        repeated = count - values.size
        room.take(sum(map(len, values)) + (repeated * len(values[-1]) if values.size else 0))
    if values.size < count:
        last = values[-1] if values.size else (b"" if values.dtype.hasobject else 0)
        values = np.concatenate([values, np.full(count - values.size, last, values.dtype)])
    return values.reshape(shape)


def _values(tensor: tensor_pb2.TensorProto, dtype: np.dtype) -> np.ndarray:
    name = _FIELDS.get(tf.as_dtype(tensor.dtype))
    if name is None:  # float8, and what has no array
        return np.frombuffer(tensor.float8_val, dtype)
    values = getattr(tensor, name)
    if name in _AS_IN_MEMORY and len(values):
        # A packed field stands in a message as in memory: protobuf writes it faster than Python makes numbers of it.
        data = tensor_pb2.TensorProto(**{name: values}).SerializeToString()
        found = np.frombuffer(data, _AS_IN_MEMORY[name], offset=len(data) - len(values) * int(_AS_IN_MEMORY[name][2]))
        return found[: found.size // 2 * 2].view(dtype) if dtype.kind == "c" else found
    if name == "half_val":
        return np.array(values, np.int64).astype(np.uint16).view(dtype)
    if name == "string_val":
        found = np.empty(len(values), dtype=object)
        found[:] = values
        return found
    kind = {"uint32_val": np.uint64, "uint64_val": np.uint64}.get(name, np.int64)
    return np.array(values, kind).astype(dtype)  # keeps the low bits, as a cast in C does


def proto_of(array: np.ndarray, *, as_content: bool) -> tensor_pb2.TensorProto:
    """Returns an array as a TensorProto.

    Args:
        as_content: numbers stand in `tensor_content` (--enable_serialization_as_tensor_content), else in `float_val`
            and its like, as TensorFlow Serving has it.
    """
    dtype = tf.string if array.dtype.kind in "OSU" else tf.as_dtype(array.dtype)
    tensor = tensor_pb2.TensorProto(dtype=dtype.as_datatype_enum)
    for size in array.shape:
        tensor.tensor_shape.dim.add(size=size)
    name = _FIELDS.get(dtype)
    if dtype == tf.string:
        tensor.string_val.extend(
            [each if isinstance(each, bytes) else str(each).encode() for each in array.reshape(-1)]
        )
    elif as_content:
        tensor.tensor_content = array.tobytes()
    elif name is None:
        tensor.float8_val = array.tobytes()
    elif name in _AS_IN_MEMORY and array.size:
        number = tensor_pb2.TensorProto.DESCRIPTOR.fields_by_name[name].number
        data = array.tobytes()
        tensor.MergeFromString(bytes([number << 3 | 2]) + encoded(len(data)) + data)
    else:
        getattr(tensor, name).extend((array.view(np.uint16) if name == "half_val" else array).reshape(-1).tolist())
    return tensor


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
