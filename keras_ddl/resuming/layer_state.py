"""State that layers keep for themselves and update in `call`, of models without a Strategy: each rank has its own.

Under a Strategy a step is that of one process, and this state is equal on all ranks.
"""

from __future__ import annotations

import numpy as np

from keras_ddl import communicator, model_state
from keras_ddl.communicator.comparison import differing
from keras_ddl.compat.keras import keras
from keras_ddl.compat.models import layer_with, plain_name, weights_made_trainable
from keras_ddl.errors import ConfigError


def agree(model: keras.Model, size: int) -> None:
    """Makes the state of layers equal on all ranks; what is equal keeps its bits. COLLECTIVE, blocking.

    By the variable's aggregation: "mean" averages, "only_first_replica" takes rank 0's, and "none" averages floats.
    Seeds are rank 0's.

    Raises: ConfigError: integers that differ, on every rank.
    Cost: 4 bytes per variable, and an all-reduce (a broadcast) of those that differ.
    """
    variables = _state_of(model)
    if not variables:
        return
    rank = communicator.rank()
    values = [variable.numpy() for variable in variables]
    name = f"keras_ddl/{plain_name(model.name)}/statistics"
    for i, other in differing([value.tobytes() for value in values], name).items():
        variable, value = variables[i], values[i]
        if variable.aggregation == "only_first_replica" or model_state.is_seed(variable):
            variable.value.assign(communicator.broadcast_array(value, root=0, name=f"{name}_{i}"))
        elif variable.aggregation == "mean" or value.dtype.kind not in "iub":
            mean = _reduced(value.astype(np.float64), f"{name}_mean_{i}") / size
            whole = np.rint(mean) if value.dtype.kind in "iu" else mean
            variable.value.assign(whole.astype(value.dtype))
        else:
            raise ConfigError(
                "State of a layer must be equal on all ranks, or keras_ddl must know how it combines. Received: "
                f"{_name(model, variable)} ({variable.dtype}) has one value on rank 0 and another on rank {other} "
                f"(rank {rank}). Say how with add_weight(..., aggregation='mean' or 'only_first_replica')."
            )


def _state_of(model: keras.Model) -> list[keras.Variable]:
    frozen = weights_made_trainable(model)  # where these differ, something is wrong, and the drift check says so
    return list({id(each): each for each in model.non_trainable_variables if id(each) not in frozen}.values())


def _reduced(value: np.ndarray, name: str) -> np.ndarray:
    return communicator.all_reduce_array(np.ascontiguousarray(value).ravel(), op="sum", name=name).reshape(value.shape)


def _name(model: keras.Model, variable: keras.Variable) -> str:
    layer = layer_with(model, variable)
    return (
        repr(variable.path) if layer is None else f"{variable.name!r} of layer {layer.name!r} ({type(layer).__name__})"
    )
