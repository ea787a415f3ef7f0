"""The collectives of Horovod's Keras interface, whose arguments differ from those of its TensorFlow interface."""

from __future__ import annotations

from typing import Any

from keras_ddl.compat.tensorflow import tf
from keras_ddl.horovod import collectives
from keras_ddl.horovod.basics import Average
from keras_ddl.horovod.compression import Compression
from keras_ddl.horovod.process_sets import ProcessSet, global_process_set


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: str | None = None,
    compression: Any = Compression.none,
    *,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Reduces a value over the ranks; see `keras_ddl.horovod.allreduce`."""
    return collectives.allreduce(
        value,
        average,
        compression=compression,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        name=name,
        process_set=process_set,
    )


def allgather(value: Any, name: str | None = None, *, process_set: ProcessSet = global_process_set) -> tf.Tensor:
    """Concatenates the rows of all ranks; see `keras_ddl.horovod.allgather`."""
    return collectives.allgather(value, name, process_set=process_set)


def broadcast(
    value: Any, root_rank: int, name: str | None = None, *, process_set: ProcessSet = global_process_set
) -> tf.Tensor:
    """Returns rank `root_rank`'s value; see `keras_ddl.horovod.broadcast`."""
    return collectives.broadcast(value, root_rank, name, process_set=process_set)


def reducescatter(
    value: Any, name: str | None = None, op: str = Average, *, process_set: ProcessSet = global_process_set
) -> tf.Tensor:
    """Reduces a value and leaves each rank its rows; see `keras_ddl.horovod.reducescatter`."""
    return collectives.reducescatter(value, op=op, name=name, process_set=process_set)
