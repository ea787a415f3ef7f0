"""The key of each variable of a model in a checkpoint.

Weights are stored under `weights/<path of the Keras variable>`. The base graph's variables have the same keys, so an
export copies key by key and needs neither Keras nor the model's code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from keras_ddl.checkpoint.snapshot import OPTIMIZER, WEIGHTS
from keras_ddl.checkpoint.tensor_bundle import variable_key
from keras_ddl.errors import CheckpointError


def weights_of(model: Any) -> dict[str, Any]:
    """Returns key -> Keras variable of all weights and seed states of a model, in Keras's order, each once.

    If several variables share a path, '#2', '#3'... are appended in that order.
    """
    from keras_ddl.compat.models import is_built  # an export reads checkpoints without Keras

    if not is_built(model):
        raise CheckpointError(
            f"A model must be built before its weights are used. Received: {type(model).__name__} {model.name!r}, "
            "not built yet. Call it on a batch, or give it an Input, first."
        )
    return keyed(WEIGHTS, model.variables)


def built_optimizers(model: Any) -> dict[str, Any]:
    return {name: each for name, each in optimizers_of(model).items() if each.built}


def slots_of(optimizers: Mapping[str, Any]) -> dict[str, Any]:
    return keyed(OPTIMIZER, [variable for each in optimizers.values() for variable in each.variables])


def optimizers_of(model: Any) -> dict[str, Any]:
    from keras_ddl.compat.models import named_optimizers_of  # an export reads checkpoints without Keras

    return named_optimizers_of(model)


def named(variables: Sequence[Any]) -> dict[str, Any]:
    """Returns name -> variable, each once, in order. The name is the Keras path, with '#2', '#3'... if it repeats."""
    names: dict[str, Any] = {}
    times: dict[str, int] = {}
    for variable in {id(variable): variable for variable in variables}.values():
        path = getattr(variable, "path", variable.name)  # tf.Variables have only names
        times[path] = times.get(path, 0) + 1
        names[path if times[path] == 1 else f"{path}#{times[path]}"] = variable
    return names


def keyed(prefix: str, variables: Sequence[Any]) -> dict[str, Any]:
    """Returns key in the bundle `prefix` -> variable."""
    return {variable_key(prefix, name): variable for name, variable in named(variables).items()}
