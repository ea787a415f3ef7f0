"""Ranks and sizes as tensors. They are constants because they do not change while a job runs."""

from __future__ import annotations

from keras_ddl import communicator
from keras_ddl.compat.tensorflow import tf
from keras_ddl.horovod import process_sets


def rank_op(name: str | None = None) -> tf.Tensor:
    """Returns `rank()` as int32 []."""
    return tf.constant(communicator.rank(), tf.int32, name=name)


def size_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Returns the number of ranks of a process set as int32 []."""
    return tf.constant(process_sets.process_set_by_id(process_set_id).size(), tf.int32, name=name)


def local_rank_op(name: str | None = None) -> tf.Tensor:
    """Returns `local_rank()` as int32 []."""
    return tf.constant(communicator.local_rank(), tf.int32, name=name)


def local_size_op(name: str | None = None) -> tf.Tensor:
    """Returns `local_size()` as int32 []."""
    return tf.constant(communicator.local_size(), tf.int32, name=name)


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Returns int32 []: 1 if this rank is in the process set, 0 otherwise."""
    return tf.constant(int(process_sets.process_set_by_id(process_set_id).included()), tf.int32, name=name)
