"""Broadcasts the variables of a model and its optimizers, which must be equal on all ranks that train together."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from keras_ddl import communicator, ops
from keras_ddl.communicator.comparison import differing
from keras_ddl.compat import keras as keras_compat
from keras_ddl.compat import models
from keras_ddl.compat.keras import keras
from keras_ddl.compat.models import layer_with, weights_made_trainable
from keras_ddl.compat.names import is_seed, plain_name
from keras_ddl.compat.tensorflow import tf
from keras_ddl.errors import ConfigError
from keras_ddl.strategy import accumulation, agreement
from keras_ddl.strategy.agreement.random_state import seed_offset
from keras_ddl.strategy.variables.origin import of_one_rank


def build_optimizer(model: Any) -> None:
    """Creates the optimizer's variables, which Keras would create in the first step. Call it on all ranks."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not optimizer.built:
        with model.distribute_strategy.scope(), of_one_rank(False):
            optimizer.build(model.trainable_variables)


def broadcast_training_state(model: Any, root: int = 0, exclude: Iterable[Any] = ()) -> None:
    """Broadcasts root's variables to all ranks, except `exclude` and the optimizers' slots for them. COLLECTIVE.

    Without a Strategy, random layers then use a different stream on each rank. Under a Strategy, the ranks share a
    seed, and each rank uses the numbers of its rows.

    Raises: RankMismatchError: the ranks have different variables.
    """
    if not communicator.is_initialized() or communicator.size() == 1:
        return
    if models.has_keras_train_step(model):  # a custom step may update any variable
        build_optimizer(model)
    variables = _without(exclude, agreement.all_variables(model))
    broadcast_with_streams(variables, root, own_streams=keras_compat.strategy_of(model) is None)


def broadcast_with_streams(variables: Sequence[Any], root: int = 0, *, own_streams: bool = True) -> None:
    """Broadcasts root's variables. With `own_streams`, each rank's random layers get their own stream. COLLECTIVE."""
    agreement.broadcast_variables(variables, root=root)
    stream = (communicator.rank() - root) % communicator.size()
    if stream and own_streams:
        for variable in filter(is_seed, variables):
            seed, *rest = variable.numpy().tolist()
            variable.assign([(seed + seed_offset(stream)) % 2**31, *rest])


def _without(exclude: Iterable[Any], variables: list[Any]) -> list[Any]:
    left_out = list(exclude)
    ids = {id(each) for each in left_out}
    # Keras's names of an optimizer's slots begin with the variable's path.
    paths = tuple(f"{(getattr(each, 'path', None) or each.name).replace('/', '_')}_" for each in left_out)
    return [
        each
        for each in variables
        if id(each) not in ids and id(each.value) not in ids and not (paths and each.name.startswith(paths))
    ]


def agree_on_local_state(model: Any) -> None:
    """Combines the state that ranks compute from their own rows, for a checkpoint within an epoch. COLLECTIVE.

    Layers' state is agreed on (under a Strategy it is already equal). Gradients accumulated for the next update are
    summed: on every rank under a Strategy (strategy/accumulation.py), else on rank 0.
    """
    if communicator.is_initialized() and communicator.size() > 1:
        if keras_compat.strategy_of(model) is None:
            agree(model, communicator.size())
            _collect_accumulated_gradients(model, communicator.rank())
        else:
            accumulation.combine(model)


def _collect_accumulated_gradients(model: Any, rank: int) -> None:
    """Moves the sum of the ranks' accumulated gradients to rank 0, because only the sum over ranks is used."""
    variables = [] if model.run_eagerly else models.accumulators_of(model)
    if variables:
        for variable, total in zip(variables, ops.all_reduce_n([each.value for each in variables], op="sum")):
            variable.assign(total if rank == 0 else tf.zeros_like(total))


@contextlib.contextmanager
def agreed_layer_state(model: Any) -> Iterator[dict[str, Any]]:
    """Gives all ranks the same layer state within the block, for a checkpoint; afterwards, each rank has its own again.

    A checkpoint thus changes nothing, except that accumulated sums stay combined. Yields key -> array of each
    rank's differing states. COLLECTIVE.
    """
    if not communicator.is_initialized() or communicator.size() == 1:
        yield {}
        return
    variables = models.layer_state(model) if keras_compat.strategy_of(model) is None else []
    if not variables and not models.accumulators_of(model):
        yield {}
        return
    values = [v.numpy() for v in variables]
    own = list(differing([value.tobytes() for value in values], "Checkpoint/layer_sums"))
    gathered = gather([values[i] for i in own], "layers") if own else []
    if own or models.is_accumulating(model):
        agree_on_local_state(model)
    try:
        yield {f"layers/{rank}/{i}": each for rank, theirs in enumerate(gathered) for i, each in zip(own, theirs)}
    finally:
        for i in own:
            variables[i].assign(values[i])


def agree(model: keras.Model, size: int) -> None:
    """Makes the state of layers equal on all ranks. Equal state keeps its bits. COLLECTIVE, blocking.

    By the variable's aggregation: "mean" averages, "only_first_replica" takes rank 0's, and "none" averages floats.
    Seeds become rank 0's.

    Raises: ConfigError: integers that differ, on every rank.
    Cost: 4 bytes per variable, and an all-reduce (or broadcast) of each variable that differs.
    """
    variables = _state_of(model)
    if not variables:
        return
    rank = communicator.rank()
    values = [variable.numpy() for variable in variables]
    name = f"keras_ddl/{plain_name(model.name)}/statistics"
    for i, other in differing([value.tobytes() for value in values], name).items():
        variable, value = variables[i], values[i]
        if variable.aggregation == "only_first_replica" or is_seed(variable):
            variable.value.assign(communicator.broadcast_array(value, root=0, name=f"{name}_{i}"))
        elif variable.aggregation == "mean" or value.dtype.kind not in "iub":
            mean = _reduced(value.astype(np.float64), f"{name}_mean_{i}") / size
            whole = np.rint(mean) if value.dtype.kind in "iu" else mean
            variable.value.assign(whole.astype(value.dtype))
        else:
            raise ConfigError(
                "The state of a layer must be equal on all ranks, or keras_ddl must know how to combine it. Received: "
                f"{_name(model, variable)} ({variable.dtype}) has one value on rank 0 and another on rank {other} "
                f"(rank {rank}). Pass aggregation='mean' or aggregation='only_first_replica' to add_weight."
            )


def _state_of(model: keras.Model) -> list[keras.Variable]:
    frozen = weights_made_trainable(model)  # these must be equal anyway; if not, the drift check reports it
    return list({id(each): each for each in model.non_trainable_variables if id(each) not in frozen}.values())


def _reduced(value: np.ndarray, name: str) -> np.ndarray:
    return communicator.all_reduce_array(np.ascontiguousarray(value).ravel(), op="sum", name=name).reshape(value.shape)


def _name(model: keras.Model, variable: keras.Variable) -> str:
    layer = layer_with(model, variable)
    return (
        repr(variable.path) if layer is None else f"{variable.name!r} of layer {layer.name!r} ({type(layer).__name__})"
    )


def gather(value: Any, what: str) -> list[Any]:
    """Returns the value of every rank, for a checkpoint. COLLECTIVE."""
    if not communicator.is_initialized() or communicator.size() == 1:
        return [value]
    return communicator.all_gather_object(value, name=f"Checkpoint/{what}")
