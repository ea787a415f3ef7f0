"""Patch of Keras's `compile`, and checks that refuse some models and warn of models that each rank trains alone.

Patched: keras/src/trainers/trainer.py (3.15.1).
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import Any

from keras_ddl.communicator.reporting import stack_position
from keras_ddl.compat import keras as keras_compat
from keras_ddl.compat import models
from keras_ddl.errors import ConfigError
from keras_ddl.gradients import own_reductions
from keras_ddl.strategy import one_per_job
from keras_ddl.strategy.agreement import follow_rank_0
from keras_ddl.strategy.base import BaseStrategy, strategy_of
from keras_ddl.strategy.keras_patches import adopting
from keras_ddl.strategy.one_per_job import outside_message

_warned: weakref.WeakSet[Any] = weakref.WeakSet()  # models that each rank trains alone


def compile_model(
    original: Callable[..., Any], model: Any, optimizer: Any = "rmsprop", *args: Any, **kwargs: Any
) -> Any:
    """Compiles inside the scope even if `compile` is called outside; refuses settings that would fail later."""
    strategy = adopting.adopt_model(model)
    check_scope(model, strategy)
    parts = models.optimizers_in(optimizer)
    for part in parts:
        _check_optimizer(model, part, strategy)
    if strategy is None:
        if any(own_reductions.reduction_of(part) is not None for part in parts):
            args, kwargs = _without_xla(original, model, optimizer, args, kwargs)
            return original(*args, **kwargs)
        return original(model, optimizer, *args, **kwargs)
    bound = inspect.signature(original).bind(model, optimizer, *args, **kwargs)
    _refuse_xla(bound, model, f"under a keras_ddl.Strategy (rank {strategy.rank})")
    with strategy.scope():
        returned = original(model, optimizer, *args, **kwargs)
    if strategy.is_several:  # saves before the first step are compared with this digest
        follow_rank_0.remember(model, follow_rank_0.Held(model, strategy.job).digest)
    return returned


def _check_optimizer(model: Any, optimizer: Any, strategy: BaseStrategy | None) -> None:
    theirs = strategy_of(optimizer)
    if strategy is None:
        if theirs is not None:
            raise ConfigError(outside_message("A model", model.name, theirs))
        return
    if own_reductions.reduction_of(optimizer) is not None:
        raise ConfigError(
            "Gradients must be reduced only once. Received: a model made under a keras_ddl.Strategy and optimizer "
            f"{optimizer.name!r}, which reduces gradients itself (rank {strategy.rank}). Use the plain optimizer, made "
            "under the scope, or leave out the Strategy."
        )
    adopting.adopt_optimizer(optimizer, strategy)


def _without_xla(original: Callable[..., Any], model: Any, optimizer: Any, args: Any, kwargs: Any) -> Any:
    """Returns the arguments for an optimizer that reduces gradients itself, with jit_compile="auto" turned into False.

    Scripts with such an optimizer also pass experimental_run_tf_function=False, which Horovod asked for and Keras no
    longer knows.
    """
    kwargs = {name: value for name, value in kwargs.items() if name != "experimental_run_tf_function"}
    try:
        bound = inspect.signature(original).bind(model, optimizer, *args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{type(model).__name__}.compile() {error}") from None
    _refuse_xla(bound, model, "with an optimizer that reduces gradients")
    bound.arguments["jit_compile"] = False
    return bound.args, bound.kwargs


def _refuse_xla(bound: inspect.BoundArguments, model: Any, where: str) -> None:
    if bound.arguments.get("jit_compile") is True:
        raise ConfigError(
            f"jit_compile=True cannot be used {where}: XLA has no kernel for collectives. Received: jit_compile=True "
            f"for model {model.name!r}. Leave it out, or use jit_compile=False."
        )


def check_scope(model: Any, strategy: BaseStrategy | None) -> None:
    """Raises ConfigError if a model made outside a scope is used inside one."""
    current = keras_compat.scope_strategy() if strategy is None else None
    if current is not None:
        raise ConfigError(outside_message("A model", model.name, current))


def warn_if_alone(model: Any) -> None:
    """Warns once about a model that each rank trains alone while all ranks train other models of this process."""
    others = [strategy for strategy in one_per_job.alive() if strategy.size > 1]
    if others and model not in _warned:
        _warned.add(model)
        stack_position.warn(
            f"Model {model.name!r} was made outside the scope of the keras_ddl.Strategy of this process, so each "
            f"rank trains it alone, on all of the data (rank {others[0].rank}). Make it under `with "
            "strategy.scope():` to train it on all ranks."
        )
    elif _trains_unreduced(model) and model not in _warned:
        _warned.add(model)
        stack_position.warn(
            f"Optimizer {model.optimizer.name!r} of model {model.name!r} does not reduce gradients, but other "
            "optimizers of this process do, so each rank trains this model alone. A model that was loaded, cloned, "
            "unpickled or made from a configuration has a plain optimizer. Compile it with a DistributedOptimizer."
        )


def _trains_unreduced(model: Any) -> bool:
    """Whether Keras's own step would apply unreduced gradients in a program that reduces gradients elsewhere."""
    parts = models.optimizers_in(getattr(model, "optimizer", None))
    if not parts or not models.has_keras_train_step(model):
        return False
    if any(own_reductions.reduction_of(part) is not None for part in parts):
        return False
    return own_reductions.any_is_active()
