"""The dtypes of tensors by their numbers in tensorflow.DataType, known without TensorFlow."""

from __future__ import annotations

import ml_dtypes
import numpy as np

STRING = 7
# number -> name and NumPy's dtype; strings are arrays of bytes objects.
_KNOWN: dict[int, tuple[str, np.dtype]] = {
    1: ("float32", np.dtype(np.float32)),
    2: ("float64", np.dtype(np.float64)),
    3: ("int32", np.dtype(np.int32)),
    4: ("uint8", np.dtype(np.uint8)),
    5: ("int16", np.dtype(np.int16)),
    6: ("int8", np.dtype(np.int8)),
    STRING: ("string", np.dtype(object)),
    8: ("complex64", np.dtype(np.complex64)),
    9: ("int64", np.dtype(np.int64)),
    10: ("bool", np.dtype(np.bool_)),
    14: ("bfloat16", np.dtype(ml_dtypes.bfloat16)),
    17: ("uint16", np.dtype(np.uint16)),
    18: ("complex128", np.dtype(np.complex128)),
    19: ("half", np.dtype(np.float16)),
    22: ("uint32", np.dtype(np.uint32)),
    23: ("uint64", np.dtype(np.uint64)),
    24: ("float8_e5m2", np.dtype(ml_dtypes.float8_e5m2)),
    25: ("float8_e4m3fn", np.dtype(ml_dtypes.float8_e4m3fn)),
}
_NUMBERS = {dtype: number for number, (_, dtype) in _KNOWN.items()}


def is_known(number: int) -> bool:
    """Whether tensors of this dtype can be sent."""
    return number in _KNOWN


def name(number: int) -> str:
    """Returns TensorFlow's name of a dtype."""
    return _KNOWN[number][0] if number in _KNOWN else f"number {number}"


def numpy_dtype(number: int) -> np.dtype:
    """Returns NumPy's dtype. Raises: KeyError: there is none that can be sent."""
    return _KNOWN[number][1]


def number_of(array: np.ndarray) -> int:
    """Returns the number of an array's dtype; arrays of bytes or text are strings."""
    return STRING if array.dtype.kind in "OSU" else _NUMBERS[array.dtype]
