"""Checks the arguments of collectives, and converts tensors to and from the dtypes that the core transports."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from keras_ddl.communicator.group import Communicator
from keras_ddl.communicator.native.dtypes import DTYPES
from keras_ddl.communicator.native.requests import COMPRESSIONS
from keras_ddl.compat.tensorflow import tf
from keras_ddl.errors import ConfigError

_MAX_FEEDBACK_BYTES = 900
_REDUCTIONS = {"sum": "sum", "mean": "mean", "avg": "mean", "min": "min", "max": "max", "product": "product"}
_DTYPES = tuple(tf.as_dtype(name) for name in DTYPES)
# Collectives without arithmetic also take these dtypes. Each is sent as another dtype of the same size, with its own
# number of extra dimensions of 1, so that ranks with different dtypes get an error about shapes. Complex numbers are
# sent as pairs.
_WIRE_DTYPES = {
    tf.bool: (tf.uint8, 1),
    tf.int16: (tf.float16, 1),
    tf.uint16: (tf.float16, 2),
    tf.uint32: (tf.int32, 1),
    tf.uint64: (tf.int64, 1),
    tf.complex64: (tf.float32, 1),
    tf.complex128: (tf.float64, 1),
}


def reduction_of(op: Any) -> str:
    """Returns the native name of `op`. Raises: ConfigError: unknown."""
    if op not in _REDUCTIONS:
        raise ConfigError(f"op must be one of {', '.join(map(repr, _REDUCTIONS))}. Received: op={op!r}.")
    return _REDUCTIONS[op]


def check_compression(
    compression: Any, feedback: Any, reduction: str, dtypes: Sequence[tf.DType], function: str, *, mpi: bool = False
) -> None:
    """Raises ConfigError if the compression is unknown, or not possible for this reduction."""
    if compression not in COMPRESSIONS:
        raise ConfigError(
            f"{function}: compression must be 'bfloat16', 'float16' or None. Received: compression={compression!r}."
        )
    if feedback is not None and not (isinstance(feedback, str) and len(feedback.encode()) <= _MAX_FEEDBACK_BYTES):
        raise ConfigError(
            f"{function}: feedback must be a string of at most {_MAX_FEEDBACK_BYTES} bytes. Received: "
            f"feedback={feedback!r}. Leave it out to use the collective's name."
        )
    if compression is None:
        return
    if reduction not in ("sum", "mean"):
        raise ConfigError(
            f"{function}: compression works with op 'sum' and 'mean' only, because rounding errors are added to the "
            f"next call. Received: op={reduction!r}, compression={compression!r}. Leave out compression."
        )
    others = sorted({dtype.name for dtype in dtypes if dtype != tf.float32})
    if others:
        raise ConfigError(
            f"{function}: compression works with float32 tensors only. Received: {', '.join(others)}, "
            f"compression={compression!r}. Leave out compression, or reduce the other tensors in a separate call."
        )
    if mpi:
        raise ConfigError(
            f"{function}: plain MPI does not compress. Received: mpi=True, compression={compression!r}. Leave out one "
            "of them."
        )


def check_root(root: Any, comm: Communicator) -> None:
    """Raises ConfigError if `root` is not a rank of `comm`."""
    if isinstance(root, bool) or not isinstance(root, int) or not 0 <= root < comm.size:
        raise ConfigError(f"root must be a rank, 0 to {comm.size - 1}. Received: root={root!r}, size {comm.size}.")


def dense_tensor(value: Any, function: str, dtypes: Sequence[tf.DType] = _DTYPES) -> tf.Tensor:
    """Returns `value` as a tensor. Raises: ConfigError: it is sparse, or its dtype is not one of `dtypes`."""
    if isinstance(value, (tf.IndexedSlices, tf.SparseTensor, tf.RaggedTensor)):
        raise ConfigError(
            f"{function} takes dense tensors. Received: {type(value).__name__}. "
            "Use all_reduce for IndexedSlices, or tf.convert_to_tensor first."
        )
    tensor = tf.convert_to_tensor(value)
    if tensor.dtype not in dtypes:
        raise ConfigError(
            f"{function} takes tensors of dtype {', '.join(dtype.name for dtype in dtypes)}. "
            f"Received: dtype {tensor.dtype.name}, shape {tensor.shape}. Use tf.cast first."
        )
    return tensor


def movable(value: Any, function: str, *more: tf.DType) -> tf.Tensor:
    """Returns `value` as a tensor. Raises: ConfigError: it is sparse, or of a dtype that cannot be sent."""
    return dense_tensor(value, function, (*_DTYPES, *_WIRE_DTYPES, *more))


def to_wire_dtype(tensor: tf.Tensor, *, rows: bool = False) -> tuple[tf.Tensor, tf.DType]:
    """Returns a `movable` tensor as it is sent, and its own dtype; `rows`: a scalar may become a row."""
    dtype = tensor.dtype
    if dtype in _WIRE_DTYPES:
        wire_dtype, extra_dims = _WIRE_DTYPES[dtype]
        tensor = tf.reshape(tensor, [1]) if rows and tensor.shape.rank == 0 else tensor
        if dtype.is_complex:
            tensor = tf.stack([tf.math.real(tensor), tf.math.imag(tensor)], -1)  # bitcast has no gradient
        else:
            tensor = tf.cast(tensor, wire_dtype) if dtype == tf.bool else tf.bitcast(tensor, wire_dtype)
        for _ in range(extra_dims):
            tensor = tf.expand_dims(tensor, -1)
    return tensor, dtype


def from_wire_dtype(tensor: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Reverses `to_wire_dtype` for a tensor of `dtype`."""
    if tensor.dtype == dtype:
        return tensor
    _, extra_dims = _WIRE_DTYPES[dtype]
    for _ in range(extra_dims):
        tensor = tf.squeeze(tensor, -1)
    if dtype.is_complex:
        return tf.complex(*tf.unstack(tensor, 2, -1))
    return tf.cast(tensor, tf.bool) if dtype == tf.bool else tf.bitcast(tensor, dtype)


def by_dtype(
    tensors: list[tf.Tensor], name: str | None, collective: Callable[[list[tf.Tensor], str | None], list[tf.Tensor]]
) -> list[tf.Tensor]:
    """Calls `collective(tensors of one dtype, name)` for each dtype, and returns the results in the order of `tensors`.

    Names do not contain the dtype, and the calls run one after another, so ranks with different dtypes get an error.
    """
    results: list[Any] = [None] * len(tensors)
    before: list[tf.Tensor] = []
    for number, dtype in enumerate(dict.fromkeys(tensor.dtype for tensor in tensors)):
        places = [place for place, tensor in enumerate(tensors) if tensor.dtype == dtype]
        key = f"{name}/{number}" if name is not None and number else name
        with tf.control_dependencies(before):
            before = collective([tensors[place] for place in places], key)
        for place, result in zip(places, before):
            results[place] = result
    return results
