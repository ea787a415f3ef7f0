"""Imports Keras's private API, and finds which Strategy a model, optimizer or context belongs to.

strategy/keras_patches changes Keras. Both were written for the Keras versions in `TESTED`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from keras_ddl.compat import strategies, tensorflow_packages
from keras_ddl.compat.tensorflow import tf

# ruff: noqa: E402  (must come before Keras is imported, which fails obscurely with another backend)
tensorflow_packages.check_keras_backend()

import keras

# Versions with which `make test-versions` passed.
TESTED = ("3.13", "3.14", "3.15")


def _defining(public: type, name: str) -> Any:
    """Returns the class, among a public class and its bases, that defines the attribute `name`."""
    for each in public.__mro__:
        if name in vars(each):
            return each
    raise ImportError(f"{public.__module__}.{public.__qualname__} has no {name}")


with tensorflow_packages.private_imports("keras", "3.13 to 3.15"):
    from keras.src.backend.common.name_scope import current_path
    from keras.src.backend.tensorflow import trainer as tf_trainer
    from keras.src.legacy.saving import legacy_h5_format
    from keras.src.saving import saving_lib
    from keras.src.trainers.data_adapters import array_slicing
    from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
    from keras.src.trainers.data_adapters.generator_data_adapter import GeneratorDataAdapter
    from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter
    from keras.src.utils import io_utils

    # Private bases and modules of public classes.
    BaseOptimizer = _defining(keras.optimizers.Optimizer, "_backend_apply_gradients")
    TFOptimizer = _defining(keras.optimizers.Optimizer, "add_variable_from_reference")
    TFVariable = _defining(keras.Variable, "_initialize")
    Trainer = _defining(keras.Model, "compile")
    TFTrainer = _defining(keras.Model, "make_train_function")
    TFLayer = _defining(keras.Layer, "_set_save_spec")
    cloning = sys.modules[keras.models.clone_model.__module__]
    _seed_generator = sys.modules[keras.random.SeedGenerator.__module__]
    _global_state, _GLOBAL_SEED_GENERATOR = _seed_generator.global_state, _seed_generator.GLOBAL_SEED_GENERATOR

CallbackList = keras.callbacks.CallbackList
LossScaleOptimizer = keras.optimizers.LossScaleOptimizer
tree = keras.tree

tensorflow_packages.check_keras_backend()  # ~/.keras/keras.json may have named another one


def is_batch_moment(frames: Iterable[Any]) -> bool:
    """Whether BatchNormalization's `_moments` made an operation. `frames`: the operation's traceback.

    A `_moments` that a subclass overrides does not count, unless it calls Keras's.
    """
    home = sys.modules[keras.layers.BatchNormalization.__module__].__file__
    return any(frame.name == "_moments" and frame.filename == home for frame in frames)


def is_ddl_strategy(strategy: Any) -> bool:
    return getattr(strategy, "is_keras_ddl", False)


def strategy_of(owner: Any) -> Any:
    """Returns the keras_ddl.Strategy that a model (or optimizer) was made under, or None."""
    strategy = getattr(owner, "_distribute_strategy", None) or getattr(owner, "_distribution_strategy", None)
    return strategy if is_ddl_strategy(strategy) else None


def other_strategy_of(owner: Any) -> Any:
    """Returns the strategy other than keras_ddl's that a model or an optimizer was made under, or None."""
    strategy = getattr(owner, "_distribute_strategy", None) or getattr(owner, "_distribution_strategy", None)
    return None if is_ddl_strategy(strategy) or strategies.is_none(strategy) else strategy


def give_strategy_to_model(model: Any, strategy: Any) -> None:
    """Assigns a model to a keras_ddl.Strategy that it was not made under."""
    model._distribute_strategy = strategy


def give_strategy_to_optimizer(optimizer: Any, strategy: Any) -> None:
    """Assigns an optimizer to a keras_ddl.Strategy that it was not made under."""
    optimizer._distribution_strategy = strategy


def scope_strategy() -> Any:
    """Returns the keras_ddl.Strategy whose scope is active, or None."""
    if not tf.distribute.has_strategy():
        return None
    strategy = tf.distribute.get_strategy()
    return strategy if is_ddl_strategy(strategy) else None


def replica_strategy() -> Any:
    """Returns the keras_ddl.Strategy of more than one rank inside whose `run` this is called, or None."""
    context = tf.distribute.get_replica_context()
    if context is None or not is_ddl_strategy(context.strategy) or context.strategy.size == 1:
        return None
    return context.strategy


def global_seed_generator() -> Any:
    """Returns the generator behind `seed=None` of keras.random, or None if nothing has used it yet."""
    return _global_state.get_global_attribute(_GLOBAL_SEED_GENERATOR)


def make_global_seed_generator() -> Any:
    """Returns `global_seed_generator`'s generator. Makes an unused one without drawing from Python's random numbers."""
    if global_seed_generator() is None:
        _global_state.set_global_attribute(_GLOBAL_SEED_GENERATOR, keras.random.SeedGenerator(0))
    return global_seed_generator()


def forget_global_seed_generator() -> None:
    """Makes Keras create a new generator for `global_seed_generator` at its next use."""
    _global_state.set_global_attribute(_GLOBAL_SEED_GENERATOR, None)
