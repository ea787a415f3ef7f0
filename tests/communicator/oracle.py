"""Expected results of collectives on arrays: inputs that every rank can compute for every rank, and NumPy's result."""

import functools

import ml_dtypes
import numpy as np

from keras_ddl.communicator.native.dtypes import DTYPES as NAMES

DTYPES = [np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name) for name in NAMES]
OPS = ("sum", "mean", "min", "max", "product")
COUNTS = (0, 1, 3, 1000, 70_001)


def input_of(rank, dtype, shape, op="sum"):
    generator = np.random.default_rng(1000 + rank)
    if np.issubdtype(dtype, np.integer):
        low, high = (1, 4) if op == "product" else (0, 100) if dtype.kind == "u" else (-50, 50)
        return generator.integers(low, high, shape).astype(dtype)
    return (generator.standard_normal(shape) + (2 if op == "product" else 0)).astype(dtype)


def reduced(arrays, op):
    """Returns the result in ddl.h's precision: integers wrap or divide exactly, 16-bit floats go through float32."""
    dtype = arrays[0].dtype
    if np.issubdtype(dtype, np.integer):
        wide = [a.astype(np.int64) for a in arrays]
    else:
        wide = [a.astype(np.float32 if dtype.itemsize == 2 else dtype) for a in arrays]
    binary = {"sum": np.add, "mean": np.add, "min": np.minimum, "max": np.maximum, "product": np.multiply}[op]
    result = functools.reduce(binary, wide)
    if op == "mean":
        divided = result / len(arrays)
        result = np.trunc(divided) if np.issubdtype(dtype, np.integer) else divided.astype(result.dtype)
    return result.astype(dtype)


def assert_reduced(actual, arrays, op):
    expected = reduced(arrays, op)
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    if np.issubdtype(expected.dtype, np.integer):
        np.testing.assert_array_equal(actual, expected)
    else:
        # Sums may be associated differently, which changes a few units in the last place of the largest partial result.
        epsilon = float(ml_dtypes.finfo(expected.dtype).eps)
        scale = functools.reduce(np.maximum, [np.abs(a.astype(np.float64)) for a in arrays]) if arrays[0].size else 0
        limit = 2 * len(arrays) * epsilon * np.maximum(np.abs(expected.astype(np.float64)), scale)
        assert np.all(np.abs(actual.astype(np.float64) - expected.astype(np.float64)) <= limit)
