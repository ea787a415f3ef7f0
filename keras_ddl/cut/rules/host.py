"""What the host computes, and what is no function of its inputs: done once, by rank 0, as by one process."""

from __future__ import annotations

from typing import Any

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.registry import rule
from keras_ddl.cut.states import WHOLE
from keras_ddl.errors import ConfigError

_FUNCTIONS = ("EagerPyFunc", "PyFunc", "PyFuncStateless", "Timestamp", "NonDeterministicInts")
_EFFECTS = (
    "PrintV2",
    "WriteSummary",
    "WriteScalarSummary",
    "WriteHistogramSummary",
    "WriteImageSummary",
    "WriteAudioSummary",
    "WriteGraphSummary",
    "WriteRawProtoSummary",
    "FlushSummaryWriter",
    "WriteFile",
)


def _effect(b: Any, node: Any) -> Any:
    """Only rank 0 prints and writes; what it writes is whole."""
    inputs = b.wholes(node.inputs)
    if b.collectives.rank == 0:
        b.make(node, inputs)
    return []


def _function(b: Any, node: Any) -> Any:
    """Rank 0's results go to all: the program's function is called once, and may do what it likes.

    Only rank 0 knows their shapes. It gives all of the entries of what is gathered, the others none.
    """
    other = next((each.dtype for each in node.outputs if not _travels(each.dtype)), None)
    if other is not None:
        raise ConfigError(
            "A host function in a step runs on rank 0, and its results are sent to the other ranks: they must be "
            f"numbers, booleans or strings. Received: {other.name} of {node.type} (rank {b.collectives.rank}). "
            "Return numbers, or call it outside the step."
        )
    inputs = b.wholes(node.inputs)
    is_first = b.collectives.rank == 0
    made = b.make(node, inputs) if is_first else [None] * len(node.outputs)
    found = []
    for value, tensor in zip(node.outputs, made):
        dtype = tf.uint8 if value.dtype == tf.bool else value.dtype
        shape = tf.shape(tensor) if is_first else tf.zeros([0], tf.int32)
        entries = tf.cast(tf.reshape(tensor, [-1]), dtype) if is_first else tf.zeros([0], dtype)
        shape = b.collectives.gather(shape, b.next_name("shape"))
        entries = b.collectives.gather(entries, b.next_name("from_rank_0"))
        whole = tf.cast(tf.reshape(entries, shape), value.dtype)
        whole.set_shape(value.shape)
        found.append((whole, WHOLE))
    if found:
        b.report.from_rank_0(node)
    return found


def _travels(dtype: tf.DType) -> bool:
    return dtype.is_floating or dtype.is_integer or dtype.is_complex or dtype in (tf.bool, tf.string)


for each in (False, True):
    rule(*_EFFECTS, of_whole=each)(_effect)
    rule(*_FUNCTIONS, of_whole=each)(_function)
