"""What an optimizer keeps for a large weight, in shards: Strategy(shard_optimizer=True).

A slot is made as Keras makes it, and at once exchanged for a `ShardedVariable`: to Keras a variable of the weight's
shape, which has no memory of its own; beside it this rank's chunk (cut/flat_shards.py). A step traced on the whole
batch reads and assigns it as ever, and the cut computes with the chunks. Anything else that reads it is refused, unless
it has been gathered (gathered_slots.py): there is no way to read a number that is not the slot's.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import numpy as np

from keras_ddl import config
from keras_ddl.compat import keras as keras_compat
from keras_ddl.compat import models
from keras_ddl.compat.context import setting
from keras_ddl.compat.keras import keras
from keras_ddl.compat.tensorflow import UninitializedVariable, tf
from keras_ddl.cut.flat_shards import Layout
from keras_ddl.errors import ConfigError
from keras_ddl.strategy.checksum import checksum
from keras_ddl.strategy.step import tracing

_ENTRYWISE = tuple(
    getattr(keras.optimizers, name)
    for name in ["Adam", "AdamW", "SGD", "RMSprop", "Adagrad", "Adadelta", "Adamax", "Nadam", "Ftrl", "Lion"]
)
_ACCUMULATOR = "gradient_accumulator"  # Keras's name: each rank holds its part of a sum there, and nothing travels
_slots: weakref.WeakValueDictionary[int, ShardedVariable] = weakref.WeakValueDictionary()  # by id of the handle
_keeping: ContextVar[bool] = ContextVar("keras_ddl_keeping", default=False)


class ShardedVariable(UninitializedVariable):
    """A variable of which each rank holds a chunk.

    Attributes:
        chunk: this rank's entries, a tf.Variable. layout: whose the entries are.
        loaded: inside `deferring_restored_values`, what this rank was assigned. assigned: what tells ranks' assignments
            outside of steps apart.
    """

    def __init__(self, value: tf.Tensor, name: str, strategy: Any) -> None:
        super().__init__(trainable=False, shape=value.shape, dtype=value.dtype, name=name)
        self.layout = Layout(tuple(value.shape.as_list()), strategy.size)
        self._rank = strategy.rank
        with tf.device(strategy.extended.device):
            chunk = self.layout.cut(value, self._rank)
            # An UninitializedVariable as well: creating one does not involve a Strategy's scope.
            self.chunk = UninitializedVariable(trainable=False, shape=chunk.shape, dtype=chunk.dtype, name="chunk")
            self.chunk.assign(chunk)
        self.gathered: tf.Tensor | None = None
        self.loaded: tf.Tensor | None = None
        self.assigned = (0, 0)
        _slots[id(self.handle)] = self

    def is_initialized(self, name: str | None = None) -> tf.Tensor:
        return tf.constant(True)

    def _read_variable_op(self, *args: Any, **kwargs: Any) -> tf.Tensor:
        if _in_traced_step():
            return super()._read_variable_op(*args, **kwargs)
        if self.gathered is None or not tf.executing_eagerly():
            raise self._refusal("a read")
        return self.gathered

    def assign(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        if _in_traced_step():
            return super().assign(value, *args, **kwargs)
        if not tf.executing_eagerly():
            raise self._refusal("an assignment")
        value = tf.convert_to_tensor(value, self.dtype)
        self.shape.assert_is_compatible_with(value.shape)
        self.chunk.assign(self.layout.cut(value, self._rank))
        if _keeping.get():
            self.loaded = value
        else:
            self.assigned = (self.assigned[0] + 1, checksum(value.numpy()))
        if self.gathered is not None:
            self.gathered = value
        return self

    def assign_add(self, delta: Any, *args: Any, **kwargs: Any) -> Any:
        return self._change("assign_add", super().assign_add, delta, args, kwargs)

    def assign_sub(self, delta: Any, *args: Any, **kwargs: Any) -> Any:
        return self._change("assign_sub", super().assign_sub, delta, args, kwargs)

    def _change(self, name: str, of_step: Callable[..., Any], delta: Any, args: Any, kwargs: Any) -> Any:
        if not _in_traced_step():
            raise self._refusal(name)
        return of_step(delta, *args, **kwargs)

    def _refusal(self, what: str) -> ConfigError:
        where = "in strategy.run" if keras_compat.replica_strategy() is not None else "outside of such a step"
        return ConfigError(
            "A variable that an optimizer keeps in shards, with Strategy(shard_optimizer=True), can be used only "
            "inside steps of fit and strategy.function, and not with run_eagerly=True. Received: "
            f"{what} of {self.name} {where} (rank {self._rank}). Read and save it inside `with "
            "strategy.whole_optimizer(model):`, on all ranks; save with "
            "keras_ddl.callbacks.Checkpoint; or make the Strategy without shard_optimizer."
        )

    def __repr__(self) -> str:
        first, count = self.layout.chunk(self._rank)
        return (
            f"<ShardedVariable {self.name!r} shape={self.shape} dtype={self.dtype.name}, rank {self._rank} has entries "
            f"{first} to {first + count}>"
        )

    __str__ = __repr__


def _in_traced_step() -> bool:
    # A step that is traced to be cut, and never runs as it is: there the variable would have no entries.
    return tracing.strategy_of_step() is not None and not tf.executing_eagerly()


def deferring_restored_values() -> Any:
    """Returns a context in which one rank may restore slots for all ranks; `gathered_slots.agree` sends them."""
    return setting(_keeping, True)


def of_handle(handle: Any) -> ShardedVariable | None:
    """Returns the variable in shards that a handle is of; None for all other tensors."""
    slot = _slots.get(id(handle))
    return slot if slot is not None and slot.handle is handle else None


def of(variable: Any) -> ShardedVariable | None:
    """Returns what is in shards of a keras.Variable or tf.Variable, or None."""
    if isinstance(variable, ShardedVariable):
        return variable
    inner = models.inner_variable(variable)
    return inner if isinstance(inner, ShardedVariable) else None


def of_this_rank(variable: Any) -> Any:
    """Returns what this rank holds of a variable, as a variable: its chunk, or all of it."""
    slot = of(variable)
    return variable if slot is None else slot.chunk


# ---- where Keras makes them


def strategy_for(optimizer: Any) -> Any:
    """Returns the Strategy that has an optimizer's slots in shards: the one that it was made under, or whose step it is
    first used in; or None.
    """
    strategy = keras_compat.strategy_of(optimizer) or tracing.strategy_of_step()
    return (
        strategy if strategy is not None and strategy.size > 1 and strategy.shards_from_elements is not None else None
    )


def check(optimizer: Any) -> None:
    """Raises ConfigError for an optimizer that does not compute each entry of a slot by itself, as far as is known."""
    strategy = strategy_for(optimizer)
    if strategy is None or type(optimizer) in _ENTRYWISE or len(models.optimizers_in(optimizer)) > 1:
        return
    names = ", ".join(each.__name__ for each in _ENTRYWISE)
    raise ConfigError(
        f"Strategy(shard_optimizer=True) takes the optimizers of Keras that update each entry by itself: {names}. "
        f"Received: {type(optimizer).__name__} {optimizer.name!r} (rank {strategy.rank}). Use one of these, or make "
        "the Strategy without shard_optimizer."
    )


def making(optimizer: Any, reference: Any, name: str | None) -> Any:
    """Returns a context in which to make a slot for `reference`: a large one is made at once, also while a step is
    traced, which would make all slots in full together when it is done.
    """
    is_large = _is_large(strategy_for(optimizer), tuple(reference.shape), name)
    return tf.init_scope() if is_large else contextlib.nullcontext()


def _is_large(strategy: Any, shape: tuple[int, ...], name: str | None) -> bool:
    return strategy is not None and name != _ACCUMULATOR and int(np.prod(shape)) >= strategy.shards_from_elements


def hold(optimizer: Any, reference: Any, variable: Any, name: str | None, initializer: Any) -> None:
    """Exchanges the value of a slot that Keras has just made for `reference`, if it is large."""
    strategy = strategy_for(optimizer)
    shape = tuple(variable.shape)
    is_slot = shape == tuple(reference.shape) and keras.backend.is_float_dtype(variable.dtype)
    if is_slot and _is_large(strategy, shape, name):
        is_made = tf.executing_eagerly()  # else the function that is traced will initialize it
        with tf.init_scope():
            first = keras.initializers.get(initializer)
            made = models.inner_variable(variable)
            value = made.read_value() if is_made else first(shape, dtype=variable.dtype)
            models.replace_inner_variable(variable, ShardedVariable(value, made.name.partition(":")[0], strategy))


def least_elements() -> int:
    """Returns the number of elements from which slots are in shards."""
    return config.get("SHARD_FROM_ELEMENTS")
