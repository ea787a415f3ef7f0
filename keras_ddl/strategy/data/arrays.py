"""Arrays given to fit, evaluate and predict: whether all ranks hold the same."""

from __future__ import annotations

import hashlib
import pickle
import warnings
from typing import Any

import numpy as np

from keras_ddl import communicator
from keras_ddl.compat.keras import keras
from keras_ddl.compat.tensorflow import tf
from keras_ddl.errors import RankMismatchError

_RULE = "Every rank must be given the whole data, in one order: keras_ddl takes each rank's rows of every batch."
_REMEDY = (
    "Shuffle or draw alike on all ranks (keras.utils.set_random_seed, or after keras_ddl.Strategy()); for data that is "
    "split already, use strategy.distribute_datasets_from_function."
)
_ROWS, _VALUES = 1024, 32  # at most so many rows, and values of a row, are looked at


def check_same_arrays(arrays: Any, rank: int) -> None:
    """Checks that all ranks read the same arrays, as far as shapes and rows spread over them tell. COLLECTIVE.

    Raises: RankMismatchError: shapes differ; or values do in every array whose rows are not all alike, so that rows
        stand in another order. Where other arrays are equal, there is a warning: values may have been drawn at random.
    """
    looks = [_look(array) for array in keras.tree.flatten(arrays) if hasattr(array, "shape") and array.shape]
    everyone = communicator.all_gather_object(looks, name="keras_ddl/arrays")
    other = next((r for r, theirs in enumerate(everyone) if theirs != everyone[0]), None)
    if other is None:
        return
    shapes = [[shape for shape, _, _ in theirs] for theirs in (everyone[0], everyone[other])]
    if shapes[0] != shapes[1]:
        raise RankMismatchError(
            f"{_RULE} Received: arrays of shapes {shapes[0]} on rank 0 and {shapes[1]} on rank {other} (rank {rank}). "
            f"{_REMEDY}"
        )
    differing = [i for i, (one, theirs) in enumerate(zip(everyone[0], everyone[other])) if one != theirs]
    agreeing = [i for i, (_, _, told) in enumerate(everyone[0]) if told and i not in differing]
    received = f"Received: other values on rank {other} than on rank 0 in array(s) {differing} of {len(looks)}"
    if not agreeing:
        raise RankMismatchError(f"{_RULE} {received} (rank {rank}). {_REMEDY}")
    if rank == 0:
        warnings.warn(f"{_RULE} {received}, which is right only if they were drawn at random. {_REMEDY}", stacklevel=6)


def _look(array: Any) -> tuple[tuple[int, ...], bytes, bool]:
    """Returns the shape, a digest of rows spread over the array, and whether these differ from one another."""
    shape = tuple(array.shape)
    if hasattr(array, "iloc"):  # pandas
        sample = array.iloc[:: _step(shape[0], _ROWS)].to_numpy()
    elif isinstance(array, (np.ndarray, tf.Tensor)):
        sample = np.asarray(array[:: _step(shape[0], _ROWS)])
    else:
        return shape, b"", False
    sample = sample.reshape(len(sample), int(np.prod(sample.shape[1:])))
    step = _step(sample.shape[1], _VALUES)
    sample = np.ascontiguousarray(sample[:, step // 2 :: step])
    rows = [pickle.dumps(row) if sample.dtype.hasobject else row.tobytes() for row in sample]
    return shape, hashlib.sha256(b"".join(rows)).digest(), len(set(rows)) > 1


def _step(length: int, most: int) -> int:
    return max(1, -(-length // most))
