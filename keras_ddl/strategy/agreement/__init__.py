"""Makes ranks agree, before and after steps, on the model, its variables, and when to stop.

Everything here is COLLECTIVE, blocks, and runs between steps, so plain NumPy arrays and Python objects suffice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from keras_ddl import communicator
from keras_ddl.communicator.comparison import require_equal_lists
from keras_ddl.compat.callbacks import initial_epoch, set_initial_epoch
from keras_ddl.compat.keras import keras
from keras_ddl.compat.models import named_optimizers_of, optimizers_of
from keras_ddl.compat.names import plain_name
from keras_ddl.compat.optimizers import trained_variables
from keras_ddl.compat.tensorflow import tf
from keras_ddl.state.replicate import replicate
from keras_ddl.strategy.shards import gathered_slots, sharded_slots

ONE_LEARNING_RATE = (
    "All ranks must begin with the same learning rate. Received: {}. Rank 0's rate is used. Compute the rate in the "
    "same way on all ranks."
)


def check_same_model(model: keras.Model) -> None:
    """Checks that all ranks train the same model with the same optimizer.

    Raises: RankMismatchError: on every rank, with the first variable that differs.
    Cost: 32 bytes per rank; the lists of variables only if they differ.
    """
    require_equal_lists(
        descriptions(model),
        name_of(model, "variables"),
        "All ranks must train the same model: variables of equal path, shape and dtype in the same order.",
        "Build and compile the model the same way on every rank.",
        entry="variable",
    )


def build_optimizers_as_rank_0(model: keras.Model) -> None:
    """Builds, on the other ranks, each optimizer that a callback has already built on rank 0 (say, by restoring it).

    The first step builds all other optimizers, as in one process.
    """

    def on_rank_0() -> dict[str, list[int | None]]:
        return communicator.broadcast_object(built_optimizers(model), name=name_of(model, "built_optimizers"))

    build_optimizers(model, communicator.as_one(on_rank_0))


def built_optimizers(model: keras.Model) -> dict[str, list[int | None]]:
    """Returns, for each built optimizer, the positions of its trained variables among the model's variables.

    None stands for a variable that is not the model's.
    """
    place = {id(variable): number for number, variable in enumerate(model.variables)}
    return {
        name: [place.get(id(variable)) for variable in trained]
        for name, each in named_optimizers_of(model).items()
        if each.built and (trained := trained_variables(each)) is not None
    }


def build_optimizers(model: keras.Model, built: Mapping[str, Sequence[int | None]]) -> None:
    """Builds the optimizers that `built_optimizers` returned on another rank, unless they are already built."""
    optimizers = named_optimizers_of(model)
    for name, places in built.items():
        optimizer = optimizers.get(name)
        if optimizer is not None and not optimizer.built:
            trained = [model.variables[number] for number in places if number is not None]
            if len(trained) == len(places):
                optimizer.build(trained)


def descriptions(model: keras.Model) -> list[str]:
    """Returns path, dtype and shape of each of `all_variables`."""
    return [_describe(variable) for variable in all_variables(model)]


def all_variables(model: keras.Model) -> list[keras.Variable]:
    """Returns the variables of the model and of all its optimizers, each once.

    Variables of metrics are left out, because they differ between ranks.
    """
    optimizers = [variable for each in optimizers_of(model) for variable in each.variables]
    return list({id(v): v for v in [*model.variables, *optimizers]}.values())


def broadcast_variables(variables: Iterable[keras.Variable], root: int = 0, *, are_equal: bool = False) -> None:
    """Gives all ranks the values of rank `root`. are_equal: all ranks already have equal values."""
    variables = list(variables)
    gathered_slots.scatter_restored(gathered_slots.slots_in(variables), root)
    whole = [each.value for each in sharded_slots.whole(variables)]
    replicate([each for each in whole if not are_equal or each.dtype == tf.string], root)


def agree_on_initial_epoch(model: keras.Model) -> None:
    """Makes fit begin with rank 0's epoch on all ranks."""

    def on_rank_0() -> int | None:
        return communicator.broadcast_object(initial_epoch(model), name=name_of(model, "initial_epoch"))

    set_initial_epoch(model, communicator.as_one(on_rank_0))


def name_of(model: keras.Model, what: str) -> str:
    """Returns the name of a collective that concerns a model."""
    return f"keras_ddl/{plain_name(model.name)}/{what}"


def any_rank(flag: bool, name: str) -> bool:
    """Whether the value is true on any rank."""
    return bool(communicator.all_reduce_array(np.array(flag, np.int32), op="max", name=name))


def _describe(variable: keras.Variable) -> str:
    return f"{plain_name(variable.path)} {variable.dtype}[{'x'.join(map(str, variable.shape))}]"
