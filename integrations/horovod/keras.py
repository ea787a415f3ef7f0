"""Horovod's Keras interface (horovod.tensorflow.keras): `import keras_ddl.horovod.keras as hvd`.

All other names are those of keras_ddl.horovod.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from keras_ddl import horovod
from keras_ddl.communicator.reporting import stack_position
from keras_ddl.compat import models
from keras_ddl.compat.keras import keras
from keras_ddl.compat.tensorflow import tf
from keras_ddl.errors import ConfigError
from keras_ddl.horovod import callbacks, collectives
from keras_ddl.horovod import keras_elastic as elastic
from keras_ddl.horovod.basics import Average
from keras_ddl.horovod.collectives import broadcast_global_variables
from keras_ddl.horovod.compression import Compression
from keras_ddl.horovod.optimizer import DistributedOptimizer, PartialDistributedOptimizer
from keras_ddl.horovod.process_sets import ProcessSet, global_process_set

__all__ = [
    "DistributedOptimizer",
    "PartialDistributedOptimizer",
    "allgather",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "callbacks",
    "elastic",
    "load_model",
    "reducescatter",
]


def load_model(
    filepath: Any,
    custom_optimizers: Iterable[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Any = None,
    legacy_opts: bool = False,
    *,
    backward_passes_per_step: int | None = None,
    average_aggregated_gradients: bool = False,
) -> keras.Model:
    """Returns a saved model, compiled with a `DistributedOptimizer` that has the saved optimizer's state.

    The model may have been saved with or without a DistributedOptimizer. Every rank reads the file.

    Args:
        filepath: path of a .keras or .h5 file.
        custom_optimizers: custom classes that the file may name.
        custom_objects: as in keras.models.load_model.
        compression: compression of the gradients.
        backward_passes_per_step, average_aggregated_gradients: as when the model was saved. The file only has
            gradient_accumulation_steps, with which Keras averages; without these arguments the average stays.
        legacy_opts: must be False: Keras 3 has no legacy optimizers.
    Raises: ConfigError: legacy_opts=True. Any error of keras.models.load_model.
    """
    if legacy_opts:
        raise ConfigError("Keras 3 has no legacy optimizers. Received: legacy_opts=True. Leave it out.")
    objects = {each.__name__: each for each in custom_optimizers or ()}
    model = keras.models.load_model(filepath, custom_objects={**objects, **(custom_objects or {})})
    if model.optimizer is not None:
        DistributedOptimizer(
            model.optimizer,
            compression=compression,
            backward_passes_per_step=backward_passes_per_step or 1,
            average_aggregated_gradients=average_aggregated_gradients,
        )
        _warn_of_means(model.optimizer, backward_passes_per_step)
        model.jit_compile = False  # because compile saw an optimizer that did not reduce yet
    return model


def _warn_of_means(optimizer: keras.optimizers.Optimizer, passes: int | None) -> None:
    steps = getattr(models.unwrapped(optimizer), "gradient_accumulation_steps", None)
    if steps and passes is None:
        stack_position.warn(
            f"load_model: the saved optimizer accumulates the gradients of {steps} batches, and averages them. If it "
            f"was a DistributedOptimizer with backward_passes_per_step={steps}, it added them up: pass "
            f"backward_passes_per_step={steps} to load_model, and also average_aggregated_gradients=True if it had "
            "that setting."
        )


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


def __getattr__(name: str) -> Any:
    return getattr(horovod, name)


def __dir__() -> list[str]:
    return sorted({*__all__, *dir(horovod)})
