"""Tensors of requests, checked before they become arrays, because clients are not trusted."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from tensorflow.core.framework import tensor_pb2

from keras_ddl.compat.tensorflow import tf
from keras_ddl.serving.servable import Signature
from keras_ddl.serving.status import invalid


def array_of(alias: str, proto: Any, limit_bytes: int) -> np.ndarray:
    """Returns a TensorProto as an array.

    Args:
        limit_bytes: of the array: a proto that repeats one value may expand to far more than its own size.
    Raises: RequestError: INVALID_ARGUMENT: a dtype or shape that none has, or values that do not fill the shape.
    """
    shape = [dimension.size for dimension in proto.tensor_shape.dim]
    if proto.tensor_shape.unknown_rank or any(size < 0 for size in shape):
        raise invalid(f"Input {alias!r}: the shape of a tensor must have no unknown dimension. Received: {shape}.")
    try:
        dtype = tf.as_dtype(proto.dtype)
        item = 16 if dtype == tf.string else np.dtype(dtype.as_numpy_dtype).itemsize
    except (TypeError, KeyError):  # a number that is none, or that of a reference
        raise invalid(f"Input {alias!r}: there is no dtype {proto.dtype}.") from None
    if math.prod(shape) * item > limit_bytes:
        raise invalid(f"Input {alias!r} of shape {shape} is larger than the limit of {limit_bytes} bytes.")
    try:
        return tf.make_ndarray(proto)
    except (TypeError, ValueError) as error:
        raise invalid(f"Input {alias!r}: {error}") from None


def proto_of(array: np.ndarray) -> Any:
    """Returns an array as a TensorProto."""
    if array.dtype.hasobject:
        return tf.make_tensor_proto(array, shape=array.shape)
    # As make_tensor_proto does, without its checks: half of the time.
    proto = tensor_pb2.TensorProto(
        dtype=tf.as_dtype(array.dtype).as_datatype_enum, tensor_content=np.ascontiguousarray(array).tobytes()
    )
    for size in array.shape:
        proto.tensor_shape.dim.add(size=size)
    return proto


def check(signature: Signature, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the arrays for all inputs of a signature, by alias.

    Raises: RequestError: INVALID_ARGUMENT: too many, too few, or of another dtype or shape.
    """
    missing = set(signature.inputs) - set(arrays) - set(signature.defaults)
    extra = set(arrays) - set(signature.inputs)
    if missing or extra:
        raise invalid(
            f"Inputs do not match those of signature {signature.name!r}. Sent extra: {sorted(extra)}. "
            f"Missing but required: {sorted(missing)}. It takes {sorted(signature.inputs)}."
        )
    found = {alias: arrays[alias] if alias in arrays else signature.defaults[alias] for alias in signature.inputs}
    for alias, array in found.items():
        info = signature.inputs[alias]
        dtype = tf.as_dtype(info.dtype)
        if tf.as_dtype(array.dtype) != dtype and not (dtype == tf.string and array.dtype.kind in "OSU"):
            raise invalid(f"Input {alias!r} must be of dtype {dtype.name}. Received: {tf.as_dtype(array.dtype).name}.")
        shape = tf.TensorShape(info.tensor_shape)
        if not shape.is_compatible_with(array.shape):
            raise invalid(f"Input {alias!r} must be of shape {shape}. Received: {list(array.shape)}.")
    return found


def outputs_of(signature: Signature, wanted: Any) -> list[str]:
    """Returns the requested outputs, by default all, in the signature's order.

    Raises: RequestError: INVALID_ARGUMENT: one that there is not, or the same twice.
    """
    wanted = list(wanted)
    unknown = [alias for alias in wanted if alias not in signature.outputs]
    if unknown:
        raise invalid(
            f"output tensor alias not found in signature: {unknown[0]} Outputs expected to be in the set "
            f"{{{','.join(sorted(signature.outputs))}}}."
        )
    if len(set(wanted)) < len(wanted):
        raise invalid(f"duplicate output tensor alias in {wanted}")
    return [alias for alias in signature.outputs if alias in wanted or not wanted]
