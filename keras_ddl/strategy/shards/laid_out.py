"""Variables that a layout cuts along the model axis: each rank has a slice.

When Keras makes such a variable, its value becomes a `LaidOutVariable`: this rank's slice, and a variable of the full
shape for Keras, which uses no memory. A step that is traced on the global batch reads and assigns the latter as usual,
and the cut computes with the slices (cut/axes/model_axis.py). Outside of steps the variable can be read if it has been
gathered (shards/gathered_slots.py), and assigned with the same value on all ranks.

A rank makes only its slice of the value of one of Keras's initializers (first_values.py). Values of other initializers
are made in full and sliced one by one, so no rank ever has two of them.

In a job that continues when a rank is lost and that has one data rank, each slice has a mirror on another model rank
(cut/shards/mirrors.py); state/generations.py redistributes slices.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from keras_ddl import communicator
from keras_ddl.communicator.newcomers import history
from keras_ddl.compat import keras as keras_compat
from keras_ddl.compat import models
from keras_ddl.compat.context import Setting
from keras_ddl.compat.keras import keras
from keras_ddl.compat.names import plain_name
from keras_ddl.compat.tensorflow import ResourceVariable, tf
from keras_ddl.cut import LocalPart, Slices
from keras_ddl.cut.values.layouts import Distribution, Layout
from keras_ddl.errors import ConfigError
from keras_ddl.state import replicate
from keras_ddl.state.placements import MeshPlace, Place
from keras_ddl.strategy.calls import tracing
from keras_ddl.strategy.job import Job
from keras_ddl.strategy.shards.mesh_slots import MeshSlot, making_in_shards
from keras_ddl.strategy.shards.sharded_slots import (
    ShardedVariable,
    sharded_variable,
    sharded_variable_of_handle,
)
from keras_ddl.strategy.shards.sharded_weights import ShardedWeight
from keras_ddl.strategy.variables.first_values import FirstValue, called, recipe_of, shape_of_new
from keras_ddl.strategy.variables.origin import of_one_rank

_made_outside: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # Keras's, by id of the handle
# The weight for which an optimizer makes a slot. The slot is cut in the same way as the weight.
following: Setting[Any] = Setting("reference_of_slot", None)


class LaidOutVariable(ShardedWeight):
    """A variable, of which each rank of the model axis has a slice.

    While a job continues with one model rank, that rank has the complete variable, which is then like any other
    (`is_complete`).

    Attributes:
        axis: the axis that is cut; None: no axis yet (undecided.py).
        initial: for optimizer variables, as in ShardedVariable.
    """

    def __init__(
        self,
        value: tf.Tensor | FirstValue,
        name: str,
        job: Job,
        axis: int | None,
        *,
        is_trained: bool,
        initial: Callable[[], tf.Tensor | FirstValue] | None = None,
    ) -> None:
        self.axis = axis
        super().__init__(value, name, job, initial, is_trained=is_trained)

    def shared_at(self, place: MeshPlace) -> tuple[Distribution, Place]:
        if self.axis is None:
            return Layout(tuple(self.shape.as_list()), 1), Place(0, 1)
        return Slices(tuple(self.shape.as_list()), place.model.size, self.axis), place.model

    def local_part(self) -> LocalPart:
        """Returns this rank's part of the variable, for the cut along the model axis."""
        return LocalPart(self.chunk.handle, self.layout.placement)

    def _refusal(self, what: str) -> ConfigError:
        where = "in strategy.run" if keras_compat.replica_strategy() is not None else "outside of such a step"
        return ConfigError(
            "A variable that a layout cuts along the model axis can be used only in steps of fit, evaluate, predict "
            f"and strategy.function. Received: {what} of {self.name} {where} (rank {self.share.rank} of the model "
            "axis). Read or save it inside `with strategy.whole_model(model):`, on all ranks, or save with "
            "keras_ddl.callbacks.Checkpoint."
        )

    def __repr__(self) -> str:
        return (
            f"<LaidOutVariable {self.name!r} shape={self.shape} dtype={self.dtype.name}, slice {self.share.rank} of "
            f"{self.layout.size} along axis {self.axis}>"
        )

    __str__ = __repr__


def from_initializer(variable: Any, initializer: Any) -> ShardedVariable | None:
    """Returns the value for a new Keras variable, from rank 0's initializer.

    None: no layout cuts the variable and it is not a slot in shards, or a rank's part cannot be made alone. COLLECTIVE
    if a layout cuts it or it is a slot in shards.
    """
    shape, job = models.declared_shape(variable), job_of_new_variable()
    if job is None or shape is None or not keras.backend.is_float_dtype(variable.dtype):
        return None
    with tf.init_scope():
        axis, is_in_shards = _axis_of(job, variable, shape), _is_in_shards(job, shape)
        if axis is None and not is_in_shards:
            return None
        recipe, is_same = recipe_of(initializer), _is_same_on_all_ranks(job)
        if not is_same:
            own, name = recipe, _name(variable, "first_value")
            recipe = history.left_to_join(lambda: own, lambda: communicator.broadcast_object(own, root=0, name=name))
        value = FirstValue(recipe, shape, variable.dtype) if recipe is not None else None
        if value is None or not value.is_possible:
            return None
        if is_in_shards and axis is None:  # data ranks share it, and model ranks hold the same
            return ShardedVariable(value, variable.name, job, lambda: value)
        if is_in_shards and axis is not None:
            return MeshSlot(value, variable.name, job, axis)
        assert axis is not None
        initial = (lambda: value) if is_same else None
        return LaidOutVariable(value, variable.name, job, axis, is_trained=bool(variable.trainable), initial=initial)


def initial_value(variable: Any, value: Any) -> Any:
    """Returns the value for a new Keras variable: a LaidOutVariable if a layout cuts it, else `value`.

    COLLECTIVE if a layout cuts it. `value`: its first value, or a function that returns it.
    """
    job = job_of_new_variable()
    if job is None or isinstance(value, tf.Variable) or (of_one_rank.get() and not callable(value)):
        return value
    with tf.init_scope():
        shape, value = shape_of_new(variable, value)
        axis = _axis_of(job, variable, shape)
        if axis is None:
            return value
        is_trained = bool(variable.trainable)

        def made() -> tf.Tensor:
            return tf.convert_to_tensor(called(value), variable.dtype)

        first = made()
        if _is_same_on_all_ranks(job) and callable(value):
            return LaidOutVariable(first, variable.name, job, axis, is_trained=is_trained, initial=made)
        name = _name(variable, "laid_out")
        agreed = history.left_to_join(first.numpy, lambda: replicate.broadcast_value(first.numpy(), name))
        return LaidOutVariable(tf.constant(agreed, first.dtype), variable.name, job, axis, is_trained=is_trained)


def _is_in_shards(job: Job, shape: tuple[int, ...]) -> bool:
    """Whether the variable that is being made is a slot in shards among the data ranks."""
    assert job.mesh is not None
    has_shards = job.mesh.data.size > 1 or job.goes_on  # one data rank may become several
    return making_in_shards.get() and has_shards and shape == tuple(following.get().shape)


def _is_same_on_all_ranks(job: Job) -> bool:
    """Whether the variable that is being made needs no communication.

    Optimizer variables begin with a constant, and some ranks may not make them: when a rank is lost, or while one rank
    builds them for all.
    """
    return following.get() is not None and (job.goes_on or of_one_rank.get())


def job_of_new_variable() -> Job | None:
    """Returns the job whose layout applies to the variable that is being made, or None.

    Optimizer variables follow the weights wherever the optimizer is built.
    """
    weight = weight_of_slot()
    if isinstance(weight, LaidOutVariable):
        return weight.job if weight.job.mesh is not None else None
    strategy = keras_compat.scope_strategy()
    job: Job | None = strategy.job if strategy is not None else tracing.tracing_for.get()
    return job if job is not None and job.mesh is not None and not of_one_rank.get() else None


def _name(variable: Any, collective: str) -> str:
    return f"keras_ddl/{collective}/{plain_name(variable.path)}"


def note_made(variable: Any) -> None:
    """Notes a Keras variable made outside of scopes and steps, to name it in an error if a layout cuts it."""
    if keras_compat.scope_strategy() is None and tracing.tracing_for.get() is None:
        inner = models.inner_variable(variable)
        if isinstance(inner, ResourceVariable):  # other strategies' variables have no own handle
            _made_outside[id(inner.handle)] = variable


def refuse_made_outside(job: Job, variables: Iterable[Any]) -> None:
    """Raises ConfigError if a layout should cut one of these Keras variables, but it was made outside of the scope."""
    if job.mesh is None:
        return
    for each in variables:
        if models.inner_variable(each) is not None and sharded_variable(each) is None:
            job.mesh.layout.refuse_made_outside(each.path, tuple(each.shape))


def made_outside(handles: Iterable[Any]) -> list[Any]:
    """Returns the Keras variables with these handles that were made outside of scopes and steps."""
    noted = [(handle, _made_outside.get(id(handle))) for handle in handles]
    return [each for handle, each in noted if each is not None and models.inner_variable(each).handle is handle]


def _axis_of(job: Job, variable: Any, shape: tuple[int, ...]) -> int | None:
    assert job.mesh is not None
    weight = weight_of_slot()
    if weight is not None:  # a slot is cut as its weight is
        is_alike = isinstance(weight, LaidOutVariable) and tuple(weight.shape) == shape
        return weight.axis if is_alike else None
    layout = job.mesh.layout
    return layout.axis_of(path_on_rank_0(variable) if shape and layout.has_keys else variable.path, shape)


def path_on_rank_0(variable: Any) -> str:
    """Returns rank 0's path of the variable that is being made. COLLECTIVE, once for each variable.

    On rank 0, layers may have other numbers, because it has made other models before.
    """
    global _last_path
    if _last_path is None or _last_path[0]() is not variable:
        path: str = communicator.broadcast_object(variable.path, root=0, name=_name(variable, "path"))
        _last_path = weakref.ref(variable), path
    return _last_path[1]


_last_path: tuple[weakref.ref[Any], str] | None = None


def weight_of_slot() -> Any:
    """Returns the tf.Variable of the weight for which an optimizer is making a slot, or None."""
    reference = following.get()
    return models.inner_variable(reference) if reference is not None else None


def slice_of(variable: Any) -> tf.Variable | None:
    """Returns this rank's slice of a keras.Variable, like all ranks of its model position. None: nothing cuts it."""
    cut = sharded_variable(variable)
    return cut.chunk if isinstance(cut, LaidOutVariable) else None


def local_part(outer: tf.Tensor) -> LocalPart:
    """Returns this rank's part of a tensor that a step captures, for the cut along the model axis."""
    variable = sharded_variable_of_handle(outer)
    return variable.local_part() if isinstance(variable, (LaidOutVariable, MeshSlot)) else LocalPart(outer)
