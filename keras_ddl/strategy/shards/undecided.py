"""Variables whose layout is not chosen yet.

`Strategy(layout=N)` chooses the layout when it builds the first step that uses the variables (layout_choice.py).
Until then each rank has the complete variable. Slots of a weight are made while that step is traced and have no memory
before the choice, so no rank ever has a complete slot if it is cut.

In a job that continues when a rank is lost, a choice that any remaining rank has made is kept, and newcomers follow it
(`follow_choices`). If no rank has made one, the remaining ranks choose for the mesh that they form.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from keras_ddl import communicator
from keras_ddl.communicator.newcomers import history
from keras_ddl.compat.keras import keras
from keras_ddl.compat.names import plain_name
from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.values.layouts import Layout
from keras_ddl.state import replicate
from keras_ddl.strategy.calls import tracing
from keras_ddl.strategy.job import Job
from keras_ddl.strategy.shards import laid_out
from keras_ddl.strategy.shards.laid_out import LaidOutVariable
from keras_ddl.strategy.shards.sharded_slots import ShardedVariable, Share, slot_of_handle
from keras_ddl.strategy.variables.first_values import FirstValue, called, shape_of_new
from keras_ddl.strategy.variables.origin import of_one_rank


class UndecidedVariable(LaidOutVariable):
    """A variable that is complete on every rank until a layout cuts it along an axis, or leaves it complete for good.

    Args:
        initial: a function that returns the first value, which is equal on all ranks.
        path: the path of the Keras variable.
        weight: the weight, if the variable is an optimizer's slot for it; else None.
        is_deferred: whether the variable gets memory only when its layout is chosen or when it is first read.
        begins_anew: whether `initial` can be called again without other ranks.
    Attributes:
        is_decided: whether the layout of the variable has been chosen.
    """

    def __init__(
        self,
        initial: Callable[[], tf.Tensor],
        shape: tuple[int, ...],
        dtype: tf.DType,
        name: str,
        job: Job,
        *,
        path: str,
        is_trained: bool,
        weight: UndecidedVariable | None = None,
        is_deferred: bool = False,
        begins_anew: bool = False,
    ) -> None:
        self.path, self.weight, self.is_decided = path, weight, False
        self._slots: list[weakref.ref[UndecidedVariable]] = []
        self._first = initial
        spec = tf.TensorSpec(shape, dtype)
        again = initial if begins_anew else None
        super().__init__(spec if is_deferred else initial(), name, job, None, is_trained=is_trained, initial=again)
        if weight is not None:
            weight._slots.append(weakref.ref(self))

    def begin_anew(self, value: tf.Tensor | tf.TensorSpec | FirstValue, job: Job) -> None:
        if isinstance(value, tf.TensorSpec):
            self.share = Share(Layout(tuple(value.shape.as_list()), 1), 0, 0, None, None)
        else:
            super().begin_anew(value, job)

    def share_of(self, value: tf.Tensor | FirstValue, job: Job) -> Share:
        if self.axis is None:
            return Share(Layout(tuple(value.shape.as_list()), 1), 0, 0, value, None)
        return super().share_of(value, job)

    @property
    def slots(self) -> list[UndecidedVariable]:
        """The optimizers' slots for this variable that have its shape."""
        return [slot for each in self._slots if (slot := each()) is not None]

    @property
    def is_spread(self) -> bool:
        return super().is_spread and not self.is_deferred

    @property
    def is_deferred(self) -> bool:
        """Whether it has no memory yet."""
        return not self.is_complete and self.axis is None

    def complete(self) -> None:
        if self.is_deferred:
            with tf.init_scope():
                self.begin_anew(self._first(), self.job)

    def decide(self, axis: int | None) -> None:
        """Cuts the variable and its slots along an axis from now on, or leaves them complete."""
        for each in self.slots:
            if not each.is_decided:
                each.decide(axis)
        if axis is None:
            self.complete()
        else:
            self._cut(axis)
        self.is_decided = True

    def _cut(self, axis: int) -> None:
        with tf.init_scope():
            value = self._first() if self.is_deferred else self.read_value()
            self.axis = axis
            self.begin_anew(value, self.job)

    def _read_variable_op(self, *args: Any, **kwargs: Any) -> tf.Tensor:
        if tf.executing_eagerly():
            self.complete()
        return super()._read_variable_op(*args, **kwargs)

    def assign(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        if tf.executing_eagerly():
            self.complete()
        return super().assign(value, *args, **kwargs)


def initial_value(variable: Any, value: Any) -> Any:
    """Returns the value for a new Keras variable: an UndecidedVariable if a layout is to be chosen, else `value`.

    value: its first value, a function that returns it, or a tf.Variable. COLLECTIVE if a layout is to be chosen.
    """
    job = laid_out.job_of_new_variable()
    if job is None or job.mesh is None or not job.mesh.layout.is_to_choose:
        return value
    if isinstance(value, tf.Variable) or not keras.backend.is_float_dtype(variable.dtype):
        return value
    weight = laid_out.weight_of_slot()
    is_slot = weight is not None
    if of_one_rank.get() and not callable(value):
        return value
    if is_slot and not isinstance(weight, UndecidedVariable):
        return value
    with tf.init_scope():
        shape, value = shape_of_new(variable, value)
        dtype = tf.as_dtype(variable.dtype)
        if not shape or is_slot and tuple(weight.shape) != shape:
            return value

        def initial() -> tf.Tensor:
            first = tf.convert_to_tensor(called(value), dtype)
            if is_slot and callable(value):  # a slot begins with a constant, and maybe only one rank makes it
                return first
            name = f"keras_ddl/laid_out/{plain_name(variable.path)}"
            agreed = history.left_to_join(first.numpy, lambda: replicate.broadcast_value(first.numpy(), name))
            return tf.constant(agreed, dtype)

        made = UndecidedVariable(
            initial,
            shape,
            dtype,
            variable.name,
            job,
            path=variable.path if is_slot else laid_out.path_on_rank_0(variable),
            is_trained=bool(variable.trainable),
            weight=weight,
            is_deferred=is_slot and callable(value) and tracing.tracing_for.get() is not None,
            begins_anew=is_slot and callable(value),
        )
        if is_slot and weight.is_decided:  # to be complete
            made.decide(None)
        return made


def undecided_of_handle(handle: Any) -> UndecidedVariable | None:
    """Returns the undecided variable with this resource handle, or None."""
    variable = slot_of_handle(handle)
    return variable if isinstance(variable, UndecidedVariable) and not variable.is_decided else None


def follow_choices(variables: Iterable[ShardedVariable], *, is_new: bool) -> None:
    """Gives all ranks the choices that any of them has made, before slices are redistributed. COLLECTIVE.

    is_new: this rank has run no step yet.
    """
    laid_out_ones = [each for each in variables if isinstance(each, LaidOutVariable)]
    mine = {
        each.number: each.axis for each in laid_out_ones if not isinstance(each, UndecidedVariable) or each.is_decided
    }
    gathered = communicator.all_gather_object({} if is_new else mine, name="keras_ddl/chosen_layout/of_ranks")
    chosen = {number: axis for each in gathered for number, axis in each.items()}
    for each in laid_out_ones:
        if isinstance(each, UndecidedVariable) and not each.is_decided:
            if not is_new:
                each.complete()  # a new rank gets the value
            if each.number in chosen:
                each.axis, each.is_decided = chosen[each.number], True
