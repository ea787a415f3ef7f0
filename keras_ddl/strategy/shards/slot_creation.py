"""Puts optimizer slots in shards when Keras creates them (keras_patches/variables.py)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from keras_ddl.compat import keras as keras_compat
from keras_ddl.compat import models
from keras_ddl.compat.context import Setting
from keras_ddl.compat.keras import keras
from keras_ddl.compat.tensorflow import tf
from keras_ddl.errors import ConfigError
from keras_ddl.strategy.calls import tracing
from keras_ddl.strategy.job import Job
from keras_ddl.strategy.shards.sharded_slots import ShardedVariable, is_large, slot_of
from keras_ddl.strategy.variables.first_values import FirstValue, recipe_of

_ENTRYWISE = tuple(
    getattr(keras.optimizers, name)
    for name in ["Adam", "AdamW", "SGD", "RMSprop", "Adagrad", "Adadelta", "Adamax", "Nadam", "Ftrl", "Lion"]
)
_ACCUMULATOR = "gradient_accumulator"  # Keras's name for sums of gradients (strategy/accumulation.py)
_job_of_slot: Setting[Job | None] = Setting("job_of_slot", None)  # while a slot that will be in shards is made


def _sharding_job(optimizer: Any) -> Job | None:
    """Returns the job that keeps an optimizer's slots in shards, or None.

    The optimizer was made under the job's Strategy, or is first used in one of its steps.
    """
    strategy = keras_compat.strategy_of(optimizer)
    job: Job | None = strategy.job if strategy is not None else tracing.tracing_for.get()
    if job is None or job.shards_from_elements is None:
        return None
    return job if job.size > 1 or job.goes_on else None  # one rank may become several


def check_entrywise(optimizer: Any) -> None:
    """Raises ConfigError for an optimizer that is not known to compute each entry of a slot independently."""
    job = _sharding_job(optimizer)
    if job is None or type(optimizer) in _ENTRYWISE or len(models.optimizers_in(optimizer)) > 1:
        return
    names = ", ".join(each.__name__ for each in _ENTRYWISE)
    raise ConfigError(
        "Strategy(sharding='optimizer') needs an optimizer of Keras that updates each entry of a weight independently: "
        f"{names}. Received: {type(optimizer).__name__} {optimizer.name!r} (rank {job.rank}). Use one of these "
        "optimizers, or make the Strategy without sharding."
    )


@contextlib.contextmanager
def creating_slot(optimizer: Any, reference: Any, name: str | None) -> Iterator[None]:
    """The context in which to create a slot for the weight `reference`.

    A slot that will be in shards is created immediately, even while a step is traced, because tracing would create all
    complete slots together at its end.
    """
    job = _sharding_job(optimizer)
    if job is None or not is_in_shards(optimizer, reference, name):
        yield
        return
    with tf.init_scope(), _job_of_slot(job if job.mesh is None else None):
        yield


def from_initializer(variable: Any, initializer: Any) -> ShardedVariable | None:
    """Makes the value of a new slot in shards whose entries are all equal, without ever having all of them.

    Returns None for other variables, and on a mesh (mesh_slots.py).
    """
    shape, job = models.declared_shape(variable), _job_of_slot.get()
    if job is None or shape is None or not keras.backend.is_float_dtype(variable.dtype):
        return None
    recipe = recipe_of(initializer) if getattr(initializer, "seed", None) is None else None
    value = FirstValue(recipe, shape, variable.dtype) if recipe is not None else None
    if value is None or not value.is_possible or not value.is_constant:
        return None
    return ShardedVariable(value, variable.name, job, lambda: value)


def is_in_shards(optimizer: Any, reference: Any, name: str | None) -> bool:
    """Whether a slot for the weight `reference`, of its shape, is to be in shards."""
    job = _sharding_job(optimizer)
    if job is None or name == _ACCUMULATOR and not job.shards_weights:
        return False
    return is_large(job, tuple(reference.shape))


def shard_slot(optimizer: Any, reference: Any, variable: Any, name: str | None, initializer: Any) -> None:
    """Replaces the value of a large slot that Keras has just created for the weight `reference` with a ShardedVariable.

    On a mesh, mesh_slots.py has already done this.
    """
    if slot_of(variable) is not None:
        return
    job, shape = _sharding_job(optimizer), tuple(variable.shape)
    is_slot = shape == tuple(reference.shape) and keras.backend.is_float_dtype(variable.dtype)
    if job is not None and job.mesh is None and is_slot and is_in_shards(optimizer, reference, name):
        is_made = tf.executing_eagerly()  # else the traced function initializes it
        with tf.init_scope():
            first, dtype = keras.initializers.get(initializer), variable.dtype
            made = models.inner_variable(variable)
            value = made.read_value() if is_made else first(shape, dtype=dtype)
            slot = ShardedVariable(value, made.name.partition(":")[0], job, lambda: first(shape, dtype=dtype))
            models.replace_inner_variable(variable, slot)
