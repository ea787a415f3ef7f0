"""Large weights in shards: Strategy(sharding='weights'), which is stage 3 of ZeRO.

When Keras makes such a weight, its value becomes a `ShardedWeight`. Keras sees a variable of the full shape that has no
memory, and this rank's chunk is kept beside it, as for a slot. A step that is traced on the global batch reads and
assigns the variable as usual, and the cut gathers the weight where an operation needs all of it
(cut/shards/gathered_weights.py). Outside of steps the weight can be read if it has been gathered (gathered_slots.py),
and assigned with the same value on all ranks.

With one of Keras's initializers, a rank makes only its chunk of the value (first_values.py). With other initializers,
values are made in full and reduced to a chunk one by one, so no rank ever has two full values.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from keras_ddl import communicator
from keras_ddl.communicator.newcomers import history
from keras_ddl.compat import keras as keras_compat
from keras_ddl.compat import models
from keras_ddl.compat.keras import keras
from keras_ddl.compat.names import plain_name
from keras_ddl.compat.tensorflow import UninitializedVariable, tf
from keras_ddl.errors import ConfigError
from keras_ddl.state import replicate
from keras_ddl.strategy.calls import tracing
from keras_ddl.strategy.job import Job
from keras_ddl.strategy.shards.sharded_slots import ShardedVariable, is_large
from keras_ddl.strategy.variables.first_values import FirstValue, called, recipe_of, shape_of_new
from keras_ddl.strategy.variables.origin import of_one_rank


class ShardedWeight(ShardedVariable):
    """A variable in shards that models use. Graphs that read it outside of steps work if it has been gathered."""

    @property
    def gathered(self) -> tf.Tensor | None:
        """All entries, while they can be read, also by graphs that read the variable directly."""
        return self._gathered

    @gathered.setter
    def gathered(self, value: tf.Tensor | None) -> None:
        self._gathered = value
        if self.is_spread:
            entries = tf.zeros([0], self.dtype) if value is None else value
            tf.raw_ops.AssignVariableOp(resource=self.handle, value=entries)

    @property
    def is_spread(self) -> bool:
        return not self.is_complete

    def _read_variable_op(self, *args: Any, **kwargs: Any) -> tf.Tensor:
        if self.is_complete or tf.executing_eagerly() or keras_compat.replica_strategy() is not None:
            return super()._read_variable_op(*args, **kwargs)
        value = UninitializedVariable._read_variable_op(self, *args, **kwargs)
        if tracing.tracing_for.get() is not None or self.gathered is not None or self.is_without_values:
            return value
        # A graph traced for its shapes only. In a graph that runs as it is, there would be no entries to read.
        shape = tf.raw_ops.VariableShape(input=self.handle)
        problem = f"keras_ddl: {self._refusal('a read in a graph')}"
        with tf.control_dependencies([tf.debugging.assert_equal(shape, self.shape.as_list(), problem)]):
            return tf.identity(value)

    def _refusal(self, what: str) -> ConfigError:
        where = "in strategy.run" if keras_compat.replica_strategy() is not None else "outside of such a step"
        return ConfigError(
            "A weight that Strategy(sharding='weights') keeps in shards can be used only in steps of fit, evaluate, "
            f"predict and strategy.function. Received: {what} of {self.name} {where} (rank {self.share.rank}). Read or "
            "save it inside `with strategy.whole_model(model):`, on all ranks; or save with "
            "keras_ddl.callbacks.Checkpoint; or make the Strategy without sharding."
        )


def from_initializer(variable: Any, initializer: Any) -> ShardedWeight | None:
    """Makes the value of a new Keras variable with rank 0's initializer.

    Returns None if it is not a large weight or its chunks cannot be made separately. COLLECTIVE if it is a large
    weight.
    """
    shape, job = models.declared_shape(variable), _job(variable)
    if job is None or shape is None or not is_large(job, shape):
        return None
    with tf.init_scope():
        own, name = recipe_of(initializer), _name(variable, "first_value")
        recipe = history.left_to_join(lambda: own, lambda: communicator.broadcast_object(own, root=0, name=name))
        value = FirstValue(recipe, shape, variable.dtype) if recipe is not None else None
        if value is None or not value.is_possible:
            return None
        return ShardedWeight(value, variable.name, job, lambda: value, is_trained=True)


def initial_value(variable: Any, value: Any) -> Any:
    """Returns the value for a new Keras variable: a ShardedWeight if it is a large weight, else `value`.

    COLLECTIVE if it is a large weight. `value`: its first value, or a function that returns it.
    """
    job = _job(variable)
    if job is None or isinstance(value, tf.Variable):
        return value
    with tf.init_scope():
        shape, value = shape_of_new(variable, value)
        if not is_large(job, shape):
            return value
        made, name = tf.convert_to_tensor(called(value), variable.dtype), _name(variable, "weight")
        agreed: np.ndarray = history.left_to_join(made.numpy, lambda: replicate.broadcast_value(made.numpy(), name))
        first = functools.partial(_first_value, value, variable.dtype) if callable(value) else None
        return ShardedWeight(tf.constant(agreed, made.dtype), variable.name, job, first, is_trained=True)


def _job(variable: Any) -> Job | None:
    """Returns the job that will shard a new variable if it is large, else None."""
    strategy = keras_compat.scope_strategy()
    job: Job | None = strategy.job if strategy is not None else tracing.tracing_for.get()
    if job is None or not job.shards_weights or not variable.trainable or of_one_rank.get():
        return None
    has_shards = job.size > 1 or job.goes_on  # one rank may become several
    return job if has_shards and keras.backend.is_float_dtype(variable.dtype) else None


def _name(variable: Any, collective: str) -> str:
    return f"keras_ddl/{collective}/{plain_name(variable.path)}"


def _first_value(initializer: Any, dtype: str) -> tf.Tensor:
    """Returns the first value of a weight that this rank makes before the other ranks begin the step that makes it."""
    return tf.convert_to_tensor(initializer(), dtype)
