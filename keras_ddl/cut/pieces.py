"""What a rank holds of a value, and what it knows of the batch."""

from __future__ import annotations

from typing import Any, NamedTuple

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.states import State


class Piece(NamedTuple):
    """What a rank holds of a value: a tensor of its graph, and how that relates to the whole."""

    tensor: tf.Tensor
    state: State


class Batch(NamedTuple):
    """The rows of the step. Each an int where it is known when the step is traced, else an int64 scalar of its graph.

    Attributes: total: of all ranks. mine: of this rank. first: those of the ranks before this one.
    """

    total: Any
    mine: Any
    first: Any


class Waiting(Exception):
    """A node needs a sum that has not been made yet: it is made after the next sums."""
