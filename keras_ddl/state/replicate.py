"""Gives all ranks the values of one of them: when fit begins, and when a rank lags behind the others."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from keras_ddl import communicator, ops
from keras_ddl.compat.tensorflow import tf


def numbers_of(variables: Sequence[tf.Variable]) -> list[tf.Variable]:
    """Returns the variables that hold numbers, not strings or handles (variants, resources)."""
    return [each for each in variables if each.dtype not in (tf.string, tf.variant, tf.resource)]


def replicate(variables: Sequence[tf.Variable], root: int = 0) -> None:
    """Assigns rank `root`'s values to variables of numbers and strings on all ranks. COLLECTIVE.

    Cost: a broadcast of all of them; ranks that hold equal values need not call it (agreement/equal_values.py).
    """
    if numbers := numbers_of(variables):
        ops.broadcast_variables(numbers, root=root)
    if strings := [each for each in variables if each.dtype == tf.string]:

        def broadcast_strings() -> list[object]:
            values = [each.numpy() for each in strings]
            return communicator.broadcast_object(values, root, name="keras_ddl/strings")

        for variable, value in zip(strings, communicator.as_one(broadcast_strings)):
            variable.assign(value)


def broadcast_value(value: np.ndarray, name: str, root: int = 0) -> np.ndarray:
    """Returns the array of rank `root`, which must have the shape and dtype of this rank's."""
    broadcast = communicator.broadcast_object if value.dtype.hasobject else communicator.broadcast_array
    return broadcast(value, root=root, name=name)
