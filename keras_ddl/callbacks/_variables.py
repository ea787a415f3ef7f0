"""Which variables of a model and its optimizer must be equal on all ranks."""

from __future__ import annotations

from typing import Any

import keras


def training_variables(model: Any) -> list[Any]:
    """Returns the model's variables and its optimizer's (built now, if need be), without the seeds of random layers."""
    variables = [v for v in model.variables if not is_seed(v)]
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None:
        build_optimizer(model)
        variables += optimizer.variables
    return variables


def seed_variables(model: Any) -> list[Any]:
    """Returns the states of the model's seed generators: uint32 or int64 pairs (seed, count of uses)."""
    return [v for v in model.variables if is_seed(v)]


def is_seed(variable: Any) -> bool:
    return isinstance(variable, keras.Variable) and variable.name == "seed_generator_state"


def build_optimizer(model: Any) -> None:
    """Creates the optimizer's variables, which Keras would create in the first step."""
    optimizer = model.optimizer
    if optimizer is not None and not optimizer.built:
        with model.distribute_strategy.scope():
            optimizer.build(model.trainable_variables)
