"""The program's own tf.Variables: `aggregation` and `synchronization` mean what tf.distribute documents.

In `strategy.run`, assigning to a variable with aggregation SUM or MEAN assigns the sum or mean over ranks, and to one
with ONLY_FIRST_REPLICA rank 0's value. A variable with synchronization ON_READ is local to each rank in `run`; outside
of `run` it reads as the sum, the mean or rank 0's value, and reading is COLLECTIVE. A variable without aggregation (the
default) takes only values that are equal on all ranks. They are compared when the step runs, and the error names the
variable.

Of Keras's variables, only metrics' variables follow these rules. Values that ranks add to them in `strategy.run` are
summed immediately, so on every rank a metric's result covers all rows, inside and outside of `run`. Optimizers take
care of all other variables.

Steps that see the global batch (strategy.function, fit) work as in one process and use none of this.
"""

from __future__ import annotations

import functools
from typing import Any

from keras_ddl import communicator, ops
from keras_ddl.compat import keras as keras_compat
from keras_ddl.compat import replacing
from keras_ddl.compat.context import Setting
from keras_ddl.compat.names import plain_name
from keras_ddl.compat.tensorflow import tf
from keras_ddl.errors import ConfigError
from keras_ddl.strategy.calls import tracing
from keras_ddl.strategy.variables.origin import created_by_keras

_NONE, _SUM, _MEAN, _FIRST = (
    getattr(tf.VariableAggregation, name) for name in ("NONE", "SUM", "MEAN", "ONLY_FIRST_REPLICA")
)
_ON_READ = tf.VariableSynchronization.ON_READ
_SCATTERS = (
    *(f"scatter_{what}" for what in ("sub", "add", "max", "min", "mul", "div", "update")),
    *(f"scatter_nd_{what}" for what in ("sub", "add", "update", "max", "min")),
    "batch_scatter_update",
)
_EQUAL = "A variable without aggregation must be assigned the same value on all ranks."
_REMEDY = (
    "Reduce the value first (tf.distribute.get_replica_context().all_reduce), or make the variable with "
    "aggregation=tf.VariableAggregation.SUM, MEAN or ONLY_FIRST_REPLICA"
)
updating = Setting("updating", False)


def check(rank: int, name: str | None = None, aggregation: Any = _NONE, synchronization: Any = None, **_: Any) -> None:
    """Raises ConfigError for a variable whose arguments are not supported."""
    if created_by_keras.get():
        return
    if synchronization == tf.VariableSynchronization.NONE:
        _refuse("A variable under a Strategy must not have synchronization NONE.", name, rank, "Leave it out")
    if synchronization == _ON_READ and aggregation == _NONE:
        _refuse(
            "A variable with synchronization ON_READ must have aggregation SUM, MEAN or ONLY_FIRST_REPLICA: reading "
            "it combines the values of the ranks.",
            name,
            rank,
            "For example, pass aggregation=tf.VariableAggregation.SUM",
        )


def adopt(variable: tf.Variable) -> tf.Variable:
    """Gives a new variable the behaviour for several ranks, unless it belongs to a Keras layer or optimizer."""
    kind: Any = type(variable)
    if not created_by_keras.get():
        replacing.exchange_class(variable, _class_for(kind))
    elif variable.synchronization == _ON_READ and variable.aggregation != _NONE:
        replacing.exchange_class(variable, _metric_class_for(kind))
    return variable


_Mixin: Any = object  # for type checkers: the classes below are mixed into variable classes, which `super()` calls


@functools.cache
def _metric_class_for(base: type) -> type:
    return type(base.__name__, (_MetricVariable, base), {"__module__": base.__module__})


class _MetricVariable(_Mixin):
    """Gives a metric's variable its behaviour on several ranks: every rank holds the sum over all ranks."""

    def assign(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        if _in_replica() is not None:
            value = self._global_value(tf.convert_to_tensor(value, self.dtype))
        return super().assign(value, *args, **kwargs)

    def assign_add(self, delta: Any, *args: Any, **kwargs: Any) -> Any:
        if _in_replica() is not None:
            delta = _aggregated(self, tf.convert_to_tensor(delta, self.dtype))
        return super().assign_add(delta, *args, **kwargs)

    def _global_value(self, value: tf.Tensor) -> tf.Tensor:
        if self.aggregation != _SUM:
            return _aggregated(self, value)
        before = self.read_value()  # equal on all ranks
        return before + _aggregated(self, value - before)


@functools.cache
def _class_for(base: type) -> type:
    def refused(name: str) -> Any:
        def scatter(self: Any, *args: Any, **kwargs: Any) -> Any:
            if _in_replica() is not None and self.synchronization != _ON_READ:
                _refuse(
                    "In strategy.run a variable must be assigned as a whole; scatter updates of single entries are not "
                    "supported.",
                    f"{self.name}.{name}",
                    _in_replica().rank,
                    "Reduce the whole update over ranks and use assign_add, or let a Keras optimizer apply it",
                )
            return getattr(base, name)(self, *args, **kwargs)

        return scatter

    methods = {name: refused(name) for name in _SCATTERS if hasattr(base, name)}
    return type(base.__name__, (_ProgramVariable, base), {"__module__": base.__module__, **methods})


class _ProgramVariable(_Mixin):
    """Gives the program's own tf.Variable its behaviour on several ranks."""

    def assign(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        return super().assign(_assigned(self, value), *args, **kwargs)

    def assign_add(self, delta: Any, *args: Any, **kwargs: Any) -> Any:
        return super().assign_add(_assigned(self, delta, "assign_add"), *args, **kwargs)

    def assign_sub(self, delta: Any, *args: Any, **kwargs: Any) -> Any:
        return super().assign_sub(_assigned(self, delta, "assign_sub"), *args, **kwargs)

    def _read_variable_op(self, *args: Any, **kwargs: Any) -> Any:
        value = super()._read_variable_op(*args, **kwargs)
        outside = self.synchronization == _ON_READ and _in_replica() is None
        is_own = updating.get() or tracing.sees_global_batch()
        return _aggregated(self, value) if outside and not is_own else value

    def __repr__(self) -> str:
        with updating(True):  # printing must not be collective, because a single rank may print
            return str(super().__repr__())


def _in_replica() -> Any:
    return None if updating.get() else keras_compat.replica_strategy()


def _assigned(variable: Any, value: Any, how: str = "assign") -> Any:
    """Returns the value that this rank assigns or adds when the program passes `value`."""
    strategy = _in_replica()
    on_read = variable.synchronization == _ON_READ
    if strategy is None:
        if on_read and variable.aggregation == _SUM and not updating.get() and not tracing.sees_global_batch():
            if how != "assign":
                _refuse(
                    "A variable with synchronization ON_READ and aggregation SUM is a sum over ranks, so it cannot "
                    "be added to outside of strategy.run.",
                    variable.name,
                    communicator.rank(),
                    "Assign it a value, or add in strategy.run",
                )
            value = tf.convert_to_tensor(value, variable.dtype)
            return value / communicator.size() if value.dtype.is_floating else value // communicator.size()
        return value
    if on_read:
        return value
    value = tf.convert_to_tensor(value, variable.dtype)
    if variable.aggregation != _NONE:
        return _aggregated(variable, value)
    return _equal(variable, how, value, strategy.rank)


def _equal(variable: Any, how: str, value: tf.Tensor, rank: int) -> tf.Tensor:
    """Returns `value` after the ranks have compared it. COLLECTIVE: 16 bytes.

    Raises: ConfigError: it is not the same on all ranks; in a graph, TensorFlow's error with the same words.
    """
    received = f"{variable.name}.{how} with a value that differs between ranks"
    fingerprint = tf.raw_ops.Fingerprint(data=tf.reshape(tf.io.serialize_tensor(value), [1]), method="farmhash64")
    mine = tf.cast(fingerprint[0], tf.int64)  # bytes
    least_and_most = ops.all_reduce(tf.stack([mine, -mine]), op="min", name=f"variable/{_label(variable)}/compared")
    same = tf.reduce_all(least_and_most == tf.stack([mine, -mine]))
    if tf.executing_eagerly():
        if not bool(same):
            _refuse(_EQUAL, received, rank, _REMEDY)
        return value
    message = f"keras_ddl: {_EQUAL} Received: {received} (rank {rank}). {_REMEDY}."
    with tf.control_dependencies([tf.debugging.Assert(same, [message])]):
        return tf.identity(value)


def _aggregated(variable: Any, value: tf.Tensor) -> tf.Tensor:
    name = f"variable/{_label(variable)}"
    if variable.aggregation == _FIRST:
        return ops.broadcast(value, root=0, name=name)
    return ops.all_reduce(value, op="mean" if variable.aggregation == _MEAN else "sum", name=name)


def _label(variable: Any) -> str:
    return plain_name(variable.name.partition(":")[0])


def _refuse(rule: str, received: Any, rank: int, remedy: str) -> None:
    raise ConfigError(f"{rule} Received: {received or 'a variable without a name'} (rank {rank}). {remedy}.")
