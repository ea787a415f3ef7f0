"""Private interfaces of Keras's optimizers: their variables, learning rate and moments, and the steps of an update."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from keras_ddl.compat.keras import keras

# keras_ddl's names for the steps of an update. All take gradients; "apply" and "overwrite" also take variables.
_STEPS = {
    "apply": "_backend_apply_gradients",
    "update": "_backend_update_step",
    "clip": "_clip_gradients",
    "overwrite": "_overwrite_variables_directly_with_gradients",
}


def trained_variables(optimizer: Any) -> list[Any] | None:
    """Returns the variables that an optimizer was built for, or None if it delegates updates to other optimizers."""
    trained = getattr(optimizer, "_trainable_variables", None)
    return None if trained is None else list(trained)


def delegates_updates(optimizer: Any) -> bool:
    """Whether an optimizer delegates updates to several others, each with its own variables (MultiOptimizer)."""
    return hasattr(optimizer, "_inner_optimizers")


def learning_rate_source(optimizer: Any) -> Any:
    """Returns the source of an optimizer's rate: a variable, a schedule or a function; None if it has none."""
    return getattr(optimizer, "_learning_rate", None)


def learning_rate_variable(optimizer: Any) -> Any:
    """Returns the variable that holds an optimizer's rate; None if the rate follows a schedule or a function."""
    source = learning_rate_source(optimizer)
    return source if isinstance(source, keras.Variable) else None


def rmsprop_momentums(optimizer: keras.optimizers.RMSprop) -> list[Any]:
    """Returns the variables in which RMSprop accumulates momentum; none before it is built."""
    return list(getattr(optimizer, "_momentums", []))


def batches_counted(optimizer: Any) -> Any:
    """Returns the variable that counts batches; `iterations` counts updates, which may be fewer."""
    return optimizer._iterations


def averaged_weights(optimizer: Any) -> list[Any]:
    """Returns an optimizer's moving averages of weights; none without use_ema."""
    return list(getattr(optimizer, "_model_variables_moving_average", ())) if optimizer.use_ema else []


def replace_steps(optimizer: Any, replacements: Mapping[str, Callable[..., Any]]) -> None:
    """Replaces steps ("apply", "update", "clip", "overwrite") of a single optimizer, without Keras's tracking."""
    for step, replacement in replacements.items():
        object.__setattr__(optimizer, _STEPS[step], replacement)


def original_step(optimizer: Any, step: str) -> Callable[..., Any]:
    """Returns the step as the optimizer's class defines it, even if it is replaced."""
    return functools.partial(getattr(type(optimizer), _STEPS[step]), optimizer)
