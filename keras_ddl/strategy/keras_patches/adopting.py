"""Lets models and optimizers join a Strategy although they were made outside of its scope, as in fine-tuning.

A model is trained on all ranks if it or any part of it, a layer or a model inside, was made in the scope, or is a clone
of such a model. An optimizer joins the Strategy when a model is compiled with it, or when fit begins. Each rank has
made these variables alone, so they get rank 0's values when fit begins, and each rank keeps all of them.

A model without any part from the scope stays outside: each rank may train it alone, at any time.

Patched: keras/src/backend/tensorflow/layer.py, models/cloning.py (3.15.1).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from keras_ddl.compat import keras as keras_compat
from keras_ddl.compat import models
from keras_ddl.errors import ConfigError
from keras_ddl.strategy.base import BaseStrategy, strategy_of
from keras_ddl.strategy.one_per_job import outside_message

# Strategy -> id -> layer made in its scope. By id: the program's layers need not be hashable.
_layers: weakref.WeakKeyDictionary[Any, weakref.WeakValueDictionary[int, Any]] = weakref.WeakKeyDictionary()


def init_layer(original: Callable[..., None], layer: Any, *args: Any, **kwargs: Any) -> None:
    """Notes a layer that is made in a scope."""
    original(layer, *args, **kwargs)
    _note(layer, keras_compat.scope_strategy())


def clone(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Notes a clone of a model of a Strategy."""
    made = original(model, *args, **kwargs)
    _note(made, strategy_of(model) or _strategy_of_part(model))
    return made


def _note(layer: Any, strategy: Any) -> None:
    if strategy is not None:
        _layers.setdefault(strategy, weakref.WeakValueDictionary())[id(layer)] = layer


def _strategy_of_part(part: Any) -> BaseStrategy | None:
    for strategy, layers in _layers.items():
        if layers.get(id(part)) is part:
            return strategy
    return None


def adopt_model(model: Any) -> BaseStrategy | None:
    """Returns the Strategy that trains a model, or None.

    A model that has only parts from a scope joins that Strategy here. Cost: a look at each layer of a model that has no
    Strategy yet.

    Raises: ConfigError: parts of the model were made under several Strategies.
    """
    strategy = strategy_of(model)
    if strategy is not None or keras_compat.other_strategy_of(model) is not None:
        return strategy
    for part in models.layers_of(model):
        theirs = strategy_of(part) or _strategy_of_part(part)
        if strategy is not None and theirs not in (None, strategy):
            raise ConfigError(outside_message("A model", part.name, strategy, theirs))
        strategy = strategy or theirs
    if strategy is not None:
        keras_compat.give_strategy_to_model(model, strategy)
        models.forget_functions(model)
    return strategy


def adopt_optimizer(optimizer: Any, strategy: BaseStrategy) -> None:
    """Lets an optimizer without a Strategy join one.

    Raises: ConfigError: the optimizer was made under another Strategy.
    """
    theirs = strategy_of(optimizer)
    if theirs is None and keras_compat.other_strategy_of(optimizer) is None:
        keras_compat.give_strategy_to_optimizer(optimizer, strategy)
    elif theirs is not strategy:
        raise ConfigError(outside_message("An optimizer", optimizer.name, strategy, theirs))


def adopt_optimizers(model: Any, strategy: BaseStrategy) -> None:
    """Lets all optimizers of a model join the Strategy before training, not only the compiled one."""
    for each in models.optimizers_of(model):
        for part in models.optimizers_in(each):
            if strategy_of(part) is None:
                adopt_optimizer(part, strategy)
