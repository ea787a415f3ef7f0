"""Converts TensorProtos to and from arrays, and checks them against a signature."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tensorflow.core.framework import tensor_pb2

from keras_ddl.compat.tensorflow import tf
from keras_ddl.serving.prediction.servable import Signature
from keras_ddl.serving.protocol.routing import encoded
from keras_ddl.serving.protocol.status import invalid

MAX_RANK, MAX_ELEMENTS = 64, 2**59  # limits of NumPy's arrays, whose sizes in bytes have 63 bits
_BOOL = int(tf.bool.as_datatype_enum)
# dtype -> the field of a TensorProto for its values, unless they are in `tensor_content`.
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


def dtype_name(number: int) -> str:
    """Returns TensorFlow's name of a dtype."""
    try:
        return tf.as_dtype(number).name
    except TypeError:
        return f"number {number}"


def feeds_of(signature: Signature, inputs: Mapping[str, tensor_pb2.TensorProto]) -> dict[str, np.ndarray]:
    """Returns alias -> array for the inputs of a request.

    Raises: RequestError: INVALID_ARGUMENT: the inputs do not fit the signature.
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
    return {alias: _array_of(alias, tensor) for alias, tensor in inputs.items()}


def check_names(signature: Signature, inputs: Mapping[str, Any]) -> None:
    """Raises: RequestError: INVALID_ARGUMENT: inputs are missing, or unknown."""
    missing = set(signature.inputs) - set(inputs) - set(signature.defaults)
    extra = set(inputs) - set(signature.inputs)
    if missing or extra:
        raise invalid(
            f"Inputs do not match those of signature {signature.name!r}. Sent extra: {sorted(extra)[:10]}. "
            f"Missing but required: {sorted(missing)}. It takes {sorted(signature.inputs)}."
        )


def check_shape(signature: Signature, alias: str, shape: Sequence[int]) -> None:
    """Checks a shape against the signature's shape of an input.

    This check is needed because TensorFlow's operations abort the process if the rank is wrong.

    Raises: RequestError: INVALID_ARGUMENT: the shape does not fit, or is too large for an array.
    """
    if len(shape) > MAX_RANK or math.prod(filter(None, shape)) > MAX_ELEMENTS:
        shown = f"{len(shape)} dimensions" if len(shape) > MAX_RANK else list(shape)
        raise invalid(
            f"Input {alias!r}: a tensor has at most {MAX_RANK} dimensions and 2^59 elements. Received: {shown}."
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


def _array_of(alias: str, tensor: tensor_pb2.TensorProto) -> np.ndarray:
    """Returns a tensor as an array. As in TensorFlow, missing values at the end repeat the last one."""
    try:
        if tensor.tensor_content and tensor.dtype == _BOOL:  # any nonzero byte is true
            shape = [dimension.size for dimension in tensor.tensor_shape.dim]
            return (np.frombuffer(tensor.tensor_content, np.uint8) != 0).reshape(shape)
        return tf.make_ndarray(tensor)
    except (ValueError, TypeError, OverflowError) as error:
        raise invalid(f"Input {alias!r} must fit its shape and dtype: {error}.") from None


def cast(values: np.ndarray, dtype: tf.DType) -> np.ndarray:
    """Returns numbers (also Python objects) as `dtype`. Floats are rounded to the nearest.

    Raises: ValueError, OverflowError: a number is beyond the range of `dtype`, or must be whole and is not; or values
        are text.
    Cost: two passes over the values in addition to the conversion.
    """
    wanted = np.dtype(dtype.as_numpy_dtype)
    if values.dtype == wanted or not values.size:
        return values.astype(wanted, copy=False)
    if values.dtype.kind in "US":
        raise ValueError("values are text")
    if dtype.is_integer or dtype.is_bool:
        lowest, highest = (0, 1) if dtype.is_bool else (dtype.min, dtype.max)
        for each in (values.min(), values.max()):
            each = each.item() if isinstance(each, np.generic) else each  # Python compares floats with integers exactly
            if not lowest <= each <= highest:
                raise ValueError(f"{str(each)[:50]} is beyond its range")
        if values.dtype.kind == "f" and (fractions := values[values != np.trunc(values)]).size:
            raise ValueError(f"{fractions[0]} is not a whole number")
        return values.astype(wanted)
    wide = values.astype(np.complex128 if values.dtype.kind == "c" else np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        result = wide.astype(wanted)
    if not np.isfinite(result).all():  # clients may send NaN and Infinity, but other numbers must not become one
        lost = wide[np.isfinite(wide) & ~np.isfinite(result)]
        if lost.size:
            raise ValueError(f"{lost[0]} is beyond its range")
    return result


def proto_of(array: np.ndarray, *, as_content: bool) -> tensor_pb2.TensorProto:
    """Returns an array as a TensorProto.

    Args:
        as_content: write numbers to `tensor_content` (--enable_serialization_as_tensor_content) instead of `float_val`
            and similar fields, which are TensorFlow Serving's default.
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
    """Returns the requested outputs (default: all) in the signature's order.

    Raises: RequestError: INVALID_ARGUMENT: an unknown or repeated output.
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
