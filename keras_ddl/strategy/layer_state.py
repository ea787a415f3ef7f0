"""State that layers keep for themselves and update in `call`: running statistics, counters, codebooks.

In a step of Keras such an update is made that of one process where the graph tells how it depends on the rows
(row_values.py): a sum over rows is added up over ranks, a mean weighed by their rows, a function of these computed from
the totals of all ranks. All ranks then hold the same state after every step.

Where it cannot be told (run_eagerly=True, variances and whatever else compares rows of the batch, updates inside loops
and conditions), and in Keras's own layers (BatchNormalization without synchronized=True), each rank goes on with its
own rows, and `agree` makes the ranks equal at the end of an epoch and before evaluate, predict and whatever is saved:
by the variable's `aggregation`, or, without one, by the mean of floats. Integers without one are refused.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

from keras_ddl import communicator, ops
from keras_ddl.compat.keras import keras, optimizers_with_rates, plain_name, weights_made_trainable
from keras_ddl.compat.tensorflow import tf
from keras_ddl.errors import ConfigError
from keras_ddl.strategy import step
from keras_ddl.strategy.row_kinds import INDEPENDENT, Kind

_SEEDS = "seed_generator_state"
# Attribute of a variable that is summed up when ranks agree: what all held when they did so last.
_AGREED = "_ddl_agreed"


def is_state(model: keras.Model, variable: keras.Variable) -> bool:
    """Whether a program may update a variable in a step: state of a layer that is not Keras's own; a learning rate."""
    layers = [each for each in model._flatten_layers() if not type(each).__module__.startswith("keras.src.")]
    return _is_rate(model, variable) or any(
        variable is each for layer in layers for each in layer._non_trainable_variables
    )


def _is_rate(model: keras.Model, variable: keras.Variable) -> bool:
    return any(variable is getattr(each, "_learning_rate", None) for each in optimizers_with_rates(model))


def updated(running: step.Step, variable: keras.Variable, value: tf.Tensor) -> tf.Tensor:
    """Returns what one process would have assigned to a layer's state, where that can be told; else the rank's value.

    Raises: ConfigError: single rows of the batch are to be kept, of which each rank has others.
    COLLECTIVE where the value depends on the rows.
    """
    values = running.values
    in_step = values.kinds is not None and value.graph is tf.compat.v1.get_default_graph()
    is_rank_0s = variable.aggregation == "only_first_replica" and not _is_rate(running.model, variable)  # said by Keras
    if not in_step or is_rank_0s:
        return _of_this_rank(running, variable, value)
    kind = values.kind(value)
    if kind == INDEPENDENT:
        return value
    if kind.name == "rows" and kind.axis == 0 and value.shape.rank and value.shape[0] is None:
        _refuse(
            "State of a layer must combine over ranks: sums and means over rows, and functions of these.",
            f"single rows of the batch, of which each rank has its own, for {_name(running.model, variable)}",
            running.share.rank,
            "Gather the rows first, with keras_ddl.all_gather",
        )
    if value.op.type in ("AddV2", "Sub"):
        state, change = value.op.inputs
        if values.kind(state) == INDEPENDENT and _is_sum(values.kind(change)):
            everyone = ops.all_reduce(change)
            return state + everyone if value.op.type == "AddV2" else state - everyone
    if value.dtype.is_floating and not kind.mixed and kind.name in ("total", "count", "function"):
        return values.everyone(value)
    return _of_this_rank(running, variable, value)


def _is_sum(kind: Kind) -> bool:
    return kind.is_sum and not kind.mixed


def _of_this_rank(running: step.Step, variable: keras.Variable, value: tf.Tensor) -> tf.Tensor:
    if variable.aggregation == "sum" and not hasattr(variable, _AGREED):
        with tf.init_scope():
            object.__setattr__(variable, _AGREED, variable.value.numpy())
    if not value.dtype.is_floating:
        return value
    # The mean of no rows is NaN.
    return tf.where(running.share.rows() > 0, value, tf.cast(variable.value, value.dtype))


def set_outside(variable: keras.Variable) -> None:
    """Notes that all ranks have given a variable a value outside of a step (loading, set_weights)."""
    if hasattr(variable, _AGREED):
        object.__setattr__(variable, _AGREED, variable.numpy())


def check(model: keras.Model, rank: int) -> None:
    """Raises ConfigError for a recurrent layer that carries the state of each row on to the next batch."""
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.RNN) and layer.stateful:
            _refuse(
                "A recurrent layer must not carry the state of rows from one batch to the next: the rows of a batch "
                "are dealt to the ranks anew.",
                f"layer {layer.name!r} with stateful=True",
                rank,
                "Use stateful=False, or train on one rank",
            )


def begin(model: keras.Model) -> None:
    """Notes what all ranks hold when training begins."""
    for variable in _state_of(model):
        set_outside(variable)


def agree(model: keras.Model, size: int) -> None:
    """Makes the state of layers equal on all ranks; what is equal keeps its bits. COLLECTIVE, blocking.

    By the variable's aggregation: "sum" adds up what each rank has added since they agreed last, "mean" averages,
    "only_first_replica" takes rank 0's, and "none" averages floats. Seeds are rank 0's.

    Raises: ConfigError: integers that differ, on every rank.
    Cost: 4 bytes per variable, and an all-reduce (a broadcast) of those that differ.
    """
    model.__dict__.pop("_ddl_state_is_local", None)
    variables = _state_of(model)
    if not variables:
        return
    rank = communicator.rank()
    values = [variable.numpy() for variable in variables]
    name = f"keras_ddl/{plain_name(model.name)}/statistics"
    sums = communicator.all_gather_object([zlib.crc32(value.tobytes()) for value in values], name=name)
    for i, (variable, value) in enumerate(zip(variables, values)):
        theirs = [each[i] for each in sums]
        before = getattr(variable, _AGREED, None)
        if before is not None:
            if any(each != zlib.crc32(before.tobytes()) for each in theirs):
                total = before + _reduced(value.astype(_wide(value)) - before, f"{name}_sum_{i}")
                variable.value.assign(total.astype(value.dtype))
                object.__setattr__(variable, _AGREED, variable.numpy())
            continue
        other = next((r for r, each in enumerate(theirs) if each != theirs[0]), None)
        if other is None:
            continue
        if variable.aggregation == "only_first_replica" or variable.name == _SEEDS:
            variable.value.assign(communicator.broadcast_array(value, root=0, name=f"{name}_{i}"))
        elif variable.aggregation == "mean" or np.issubdtype(_wide(value), np.floating):
            mean = _reduced(value.astype(np.float64), f"{name}_mean_{i}") / size
            whole = np.rint(mean) if value.dtype.kind in "iu" else mean
            variable.value.assign(whole.astype(value.dtype))
        else:
            _refuse(
                "State of a layer must be equal on all ranks, or keras_ddl must know how it combines.",
                f"{_name(model, variable)} ({variable.dtype}) has one value on rank 0 and another on rank {other}",
                rank,
                "Say how with add_weight(..., aggregation='sum', 'mean' or 'only_first_replica')",
            )


def _state_of(model: keras.Model) -> list[keras.Variable]:
    frozen = weights_made_trainable(model)  # where these differ, something is wrong, and the drift check says so
    return list({id(each): each for each in model.non_trainable_variables if id(each) not in frozen}.values())


def _wide(value: np.ndarray) -> Any:
    return np.int64 if value.dtype.kind in "iub" else np.float64


def _reduced(value: np.ndarray, name: str) -> np.ndarray:
    return communicator.all_reduce_array(np.ascontiguousarray(value).ravel(), op="sum", name=name).reshape(value.shape)


def _name(model: keras.Model, variable: keras.Variable) -> str:
    for layer in model._flatten_layers():
        if any(each is variable for each in layer._non_trainable_variables):
            return f"{variable.name!r} of layer {layer.name!r} ({type(layer).__name__})"
    return repr(variable.path)


def _refuse(rule: str, received: str, rank: int, remedy: str) -> None:
    raise ConfigError(f"{rule} Received: {received} (rank {rank}). {remedy}.")
