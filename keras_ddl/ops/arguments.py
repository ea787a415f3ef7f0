"""What collectives take: checks of their arguments, and tensors in the form in which they travel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from keras_ddl.communicator.dtypes import DTYPES
from keras_ddl.communicator.group import Communicator
from keras_ddl.compat.tensorflow import tf
from keras_ddl.errors import ConfigError

_REDUCTIONS = {"sum": "sum", "mean": "mean", "avg": "mean", "min": "min", "max": "max", "product": "product"}
_DTYPES = tuple(tf.as_dtype(name) for name in DTYPES)
# Collectives that only move values take more dtypes: these travel as another dtype of the same bytes.
_WIRE_DTYPES = {tf.int16: tf.float16, tf.uint16: tf.float16, tf.uint32: tf.int32, tf.uint64: tf.int64}


def reduction_of(op: Any) -> str:
    """Returns the native name of `op`. Raises: ConfigError: there is none."""
    if op not in _REDUCTIONS:
        raise ConfigError(f"op must be one of {', '.join(map(repr, _REDUCTIONS))}. Received: op={op!r}.")
    return _REDUCTIONS[op]


def check_root(root: Any, comm: Communicator) -> None:
    """Raises: ConfigError: `root` is not a rank of `comm`."""
    if isinstance(root, bool) or not isinstance(root, int) or not 0 <= root < comm.size:
        raise ConfigError(f"root must be a rank, 0 to {comm.size - 1}. Received: root={root!r}, size {comm.size}.")


def dense_tensor(value: Any, function: str, dtypes: Sequence[tf.DType] = _DTYPES) -> tf.Tensor:
    """Returns `value` as a tensor. Raises: ConfigError: it is sparse, or of another dtype than `dtypes`."""
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


def to_wire_dtype(value: Any, function: str) -> tuple[tf.Tensor, tf.DType]:
    """Returns `value` in a dtype in which it can be moved, and its own dtype."""
    tensor = dense_tensor(value, function, (*_DTYPES, *_WIRE_DTYPES, tf.bool))
    if tensor.dtype == tf.bool:
        return tf.cast(tensor, tf.uint8), tf.bool
    return (tf.bitcast(tensor, _WIRE_DTYPES[tensor.dtype]) if tensor.dtype in _WIRE_DTYPES else tensor), tensor.dtype


def from_wire_dtype(tensor: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Returns what `to_wire_dtype` made of a tensor of `dtype` as that dtype again."""
    if tensor.dtype == dtype:
        return tensor
    return tf.cast(tensor, tf.bool) if dtype == tf.bool else tf.bitcast(tensor, dtype)


def by_dtype(tensors: list[tf.Tensor], name: str | None, collective: Any) -> list[tf.Tensor]:
    """Calls `collective(tensors of one dtype, name)` for each dtype, and returns the results in the given order."""
    results: list[Any] = [None] * len(tensors)
    dtypes = list(dict.fromkeys(tensor.dtype for tensor in tensors))
    for dtype in dtypes:
        places = [place for place, tensor in enumerate(tensors) if tensor.dtype == dtype]
        key = f"{name}/{dtype.name}" if name is not None and len(dtypes) > 1 else name
        for place, result in zip(places, collective([tensors[place] for place in places], key)):
            results[place] = result
    return results
