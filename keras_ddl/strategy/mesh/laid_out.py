"""Variables that a layout cuts along the model axis: each rank has its slice of them.

Keras makes them, and their value is at once a `LaidOutVariable`: for Keras a variable of the full shape, which has no
memory of its own; beside it this rank's slice. A step that is traced on the global batch reads and assigns it as ever,
and the cut computes with the slices (cut/model_axis.py). Outside of steps it can be read where it has been gathered
(shards/gathered_slots.py), and assigned the same on all ranks.

Each is made in full, and sliced before the next is: no rank ever has two of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

from keras_ddl import ops
from keras_ddl.compat import keras as keras_compat
from keras_ddl.compat import models
from keras_ddl.compat.context import setting
from keras_ddl.compat.tensorflow import UninitializedVariable, tf
from keras_ddl.cut import HeldVariable, Slices
from keras_ddl.errors import ConfigError
from keras_ddl.strategy import agreement
from keras_ddl.strategy.job import Job
from keras_ddl.strategy.shards.sharded_slots import ShardedVariable, Share, sharded_variable, sharded_variable_of_handle
from keras_ddl.strategy.step import tracing
from keras_ddl.strategy.variable_origin import is_of_all_ranks

_made_outside: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # Keras's, by id of the handle
_reference: ContextVar[Any] = ContextVar("keras_ddl_reference_of_slot", default=None)


class LaidOutVariable(ShardedVariable):
    """A variable of which each rank of the model axis has a slice.

    Attributes: axis: that is cut; None: it is not decided yet (undecided.py).
    """

    def __init__(self, value: tf.Tensor, name: str, job: Job, axis: int | None, *, is_trained: bool) -> None:
        self.axis = axis
        super().__init__(value, name, job, _never, is_trained=is_trained)

    def share_of(self, value: tf.Tensor, job: Job, generation: int) -> Share:
        assert job.mesh is not None and self.axis is not None
        slices = Slices(tuple(value.shape.as_list()), job.mesh.model.size, self.axis)
        with tf.device(job.device):
            slice_ = UninitializedVariable(
                trainable=False, shape=slices.shape_of_slice, dtype=value.dtype, name=f"{self.name.partition(':')[0]}"
            )
            share = Share(slices, job.mesh.model.rank, 0, slice_, None, generation)
            share.assign(value)
        self._model = job.mesh.model
        return share

    def all_gathered(self, name: str) -> tf.Tensor:
        assert self.axis is not None
        order = [self.axis, *(each for each in range(self.shape.rank) if each != self.axis)]
        rows = ops.all_gather(tf.transpose(self.chunk.read_value(), order), name=name, comm=self._model)
        return tf.transpose(rows, [order.index(each) for each in range(len(order))])

    def held(self) -> HeldVariable:
        """Returns what this rank has of the variable, for the cut along the model axis."""
        return HeldVariable(self.chunk.handle, self.layout.placement)

    @property
    def gathered(self) -> tf.Tensor | None:
        """All entries, while they can be read. Graphs that read the variable as it is find them, too."""
        return self._gathered

    @gathered.setter
    def gathered(self, value: tf.Tensor | None) -> None:
        self._gathered = value
        if self.axis is None:
            return
        held = tf.zeros([0], self.dtype) if value is None else value
        tf.raw_ops.AssignVariableOp(resource=self.handle, value=held)

    def _read_variable_op(self, *args: Any, **kwargs: Any) -> tf.Tensor:
        if tf.executing_eagerly() or keras_compat.replica_strategy() is not None:
            return super()._read_variable_op(*args, **kwargs)
        value = UninitializedVariable._read_variable_op(self, *args, **kwargs)
        if self.is_complete or tracing.job_of_step() is not None or self.gathered is not None:
            return value
        # A graph that is traced for its shapes, or one that will run as it is, where there are no entries to read.
        shape = tf.raw_ops.VariableShape(input=self.handle)
        problem = f"keras_ddl: {self._refusal('a read in a graph')}"
        with tf.control_dependencies([tf.debugging.assert_equal(shape, self.shape.as_list(), problem)]):
            return tf.identity(value)

    def _refusal(self, what: str) -> ConfigError:
        where = "in strategy.run" if keras_compat.replica_strategy() is not None else "outside of such a step"
        return ConfigError(
            "A variable that a layout_map cuts along the model axis can be used in steps of fit, evaluate, predict and "
            f"strategy.function. Received: {what} of {self.name} {where} (rank {self.share.rank} of the model axis). "
            "Read and save it inside `with strategy.whole_model(model):`, on all ranks, or save with "
            "keras_ddl.callbacks.Checkpoint."
        )

    def __repr__(self) -> str:
        return (
            f"<LaidOutVariable {self.name!r} shape={self.shape} dtype={self.dtype.name}, slice {self.share.rank} of "
            f"{self.layout.size} along axis {self.axis}>"
        )

    __str__ = __repr__


def _never() -> tf.Tensor:
    raise AssertionError("a mesh does not go on with other ranks")


def following(reference: Any) -> AbstractContextManager[None]:
    """Returns a context in which an optimizer makes a slot for the weight `reference`: it is cut as the weight is."""
    return setting(_reference, reference)


def initial_value(variable: Any, value: Any) -> Any:
    """Returns what a Keras variable is to be made with: a LaidOutVariable if a layout cuts it, else `value`.

    COLLECTIVE, where a layout cuts it. `value`: its first value, or a function that returns it.
    """
    strategy = keras_compat.scope_strategy()
    job: Job | None = strategy.job if strategy is not None else tracing.job_of_step()
    if job is None or job.mesh is None or isinstance(value, tf.Variable) or not is_of_all_ranks():
        return value
    with tf.init_scope():
        shape = models.declared_shape(variable)
        if shape is None:  # Keras takes it from the value
            value = _called(value)
            shape = tuple(tf.convert_to_tensor(value).shape)
        axis = _axis_of(job, variable, shape)
        if axis is None:
            return value
        first = tf.convert_to_tensor(_called(value), variable.dtype)
        agreed = agreement.broadcast_value(first.numpy(), f"keras_ddl/laid_out/{models.plain_name(variable.path)}")
        return LaidOutVariable(
            tf.constant(agreed, first.dtype), variable.name, job, axis, is_trained=bool(variable.trainable)
        )


def note_made(variable: Any) -> None:
    """Remembers a Keras variable that was just made outside of scopes and steps, to be named if a layout cuts it."""
    if keras_compat.scope_strategy() is None and tracing.job_of_step() is None:
        inner = models.inner_variable(variable)
        if inner is not None:
            _made_outside[id(inner.handle)] = variable


def refuse_made_outside(job: Job, variables: Iterable[Any]) -> None:
    """Raises ConfigError where a layout cuts one of these Keras variables, which is not cut, as it was made outside of
    the scope.
    """
    if job.mesh is None:
        return
    for each in variables:
        if models.inner_variable(each) is not None and sharded_variable(each) is None:
            job.mesh.layout.refuse_made_outside(each.path, tuple(each.shape))


def made_outside(handles: Iterable[Any]) -> list[Any]:
    """Returns the Keras variables with these handles that were made outside of scopes and steps."""
    noted = [(handle, _made_outside.get(id(handle))) for handle in handles]
    return [each for handle, each in noted if each is not None and models.inner_variable(each).handle is handle]


def _called(value: Any) -> Any:
    return value() if callable(value) else value


def _axis_of(job: Job, variable: Any, shape: tuple[int, ...]) -> int | None:
    assert job.mesh is not None
    weight = weight_of_slot()
    if isinstance(weight, LaidOutVariable):
        return weight.axis if tuple(weight.shape) == shape else None
    return job.mesh.layout.axis_of(variable.path, shape)


def weight_of_slot() -> Any:
    """Returns the tf.Variable of the weight for which an optimizer makes a slot now; None: it makes none."""
    reference = _reference.get()
    return models.inner_variable(reference) if reference is not None else None


def laid_out_of_handle(handle: Any) -> LaidOutVariable | None:
    """Returns the LaidOutVariable with this resource handle; None for all other tensors."""
    variable = sharded_variable_of_handle(handle)
    return variable if isinstance(variable, LaidOutVariable) else None


def held(outer: tf.Tensor) -> HeldVariable:
    """Returns what this rank has of a tensor that a step captures, for the cut along the model axis."""
    variable = laid_out_of_handle(outer)
    return HeldVariable(outer) if variable is None else variable.held()
