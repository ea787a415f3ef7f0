"""The only module that imports Keras's private API; and which Strategy a model, optimizer or context belongs to.

What is changed in Keras is in strategy/keras_patches. Both were written for the Keras versions in `TESTED`.
"""

from __future__ import annotations

import re
import sys
import weakref
from collections.abc import Iterable
from typing import Any

from keras_ddl.compat import tensorflow_packages
from keras_ddl.compat.tensorflow import tf

# ruff: noqa: E402  (before Keras is imported: with another backend that fails for a reason nobody would understand)
tensorflow_packages.check_keras_backend()

import keras

# Versions with which `make test-versions` passed.
TESTED = ("3.13", "3.14", "3.15")


def _defining(public: type, name: str) -> type:
    """Returns the class that gives a public class the attribute `name`: itself or a base, wherever that was made."""
    for each in public.__mro__:
        if name in vars(each):
            return each
    raise ImportError(f"{public.__module__}.{public.__qualname__} has no {name}")


with tensorflow_packages.private_imports("keras", "3.13 to 3.15", "'keras>=3.13,<3.16'"):
    from keras.src.backend.common.name_scope import current_path
    from keras.src.backend.tensorflow import trainer as tf_trainer
    from keras.src.legacy.saving import legacy_h5_format
    from keras.src.saving import saving_lib
    from keras.src.trainers.data_adapters import array_slicing
    from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
    from keras.src.trainers.data_adapters.generator_data_adapter import GeneratorDataAdapter
    from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter
    from keras.src.utils import io_utils

    # What is not public about public classes: the bases that are changed, and the modules that they are made in.
    BaseOptimizer = _defining(keras.optimizers.Optimizer, "_backend_apply_gradients")
    TFVariable = _defining(keras.Variable, "_initialize")
    Trainer = _defining(keras.Model, "compile")
    TFTrainer = _defining(keras.Model, "make_train_function")
    _seed_generator = sys.modules[keras.random.SeedGenerator.__module__]
    _global_state, _GLOBAL_SEED_GENERATOR = _seed_generator.global_state, _seed_generator.GLOBAL_SEED_GENERATOR

CallbackList = keras.callbacks.CallbackList
LossScaleOptimizer = keras.optimizers.LossScaleOptimizer
tree = keras.tree

tensorflow_packages.check_keras_backend()  # ~/.keras/keras.json may have named another one

__all__ = [
    "ArrayDataAdapter",
    "BaseOptimizer",
    "CallbackList",
    "GeneratorDataAdapter",
    "LossScaleOptimizer",
    "PyDatasetAdapter",
    "TESTED",
    "TFTrainer",
    "TFVariable",
    "Trainer",
    "array_slicing",
    "current_path",
    "forget_global_seed_generator",
    "global_seed_generator",
    "io_utils",
    "is_batch_moment",
    "is_ours",
    "keras",
    "legacy_h5_format",
    "accumulates",
    "accumulators_of",
    "is_accumulating",
    "layer_state",
    "make_global_seed_generator",
    "metric_variables",
    "metrics_in",
    "named_optimizers_of",
    "optimizers_in",
    "optimizers_of",
    "optimizers_with_rates",
    "own_reduction",
    "plain_name",
    "reductions",
    "replica_strategy",
    "rows_counted",
    "saving_lib",
    "scope_strategy",
    "strategies",
    "strategy_of",
    "tf_trainer",
    "tree",
    "unwrapped",
    "weights_made_trainable",
]

# Strategies of more than one rank, for the warning about models made outside of them.
strategies: weakref.WeakSet[Any] = weakref.WeakSet()
# What optimizers reduce their gradients with where there is no Strategy, for the warning about optimizers that do not.
reductions: weakref.WeakSet[Any] = weakref.WeakSet()


def is_batch_moment(frames: Iterable[Any]) -> bool:
    """Whether an operation was made by BatchNormalization's `_moments`. `frames`: of its traceback.

    Not by that of a subclass, unless it calls Keras's.
    """
    home = sys.modules[keras.layers.BatchNormalization.__module__].__file__
    return any(frame.name == "_moments" and frame.filename == home for frame in frames)


def is_ours(strategy: Any) -> bool:
    """Whether `strategy` is a keras_ddl.Strategy."""
    return getattr(strategy, "is_keras_ddl", False)


def strategy_of(owner: Any) -> Any:
    """Returns the keras_ddl.Strategy that a model (or optimizer) was made under, or None."""
    strategy = getattr(owner, "_distribute_strategy", None) or getattr(owner, "_distribution_strategy", None)
    return strategy if is_ours(strategy) else None


def scope_strategy() -> Any:
    """Returns the keras_ddl.Strategy whose scope is active, or None."""
    if not tf.distribute.has_strategy():
        return None
    strategy = tf.distribute.get_strategy()
    return strategy if is_ours(strategy) else None


def replica_strategy() -> Any:
    """Returns the keras_ddl.Strategy of more than one rank inside whose `run` this is called, or None."""
    context = tf.distribute.get_replica_context()
    if context is None or not is_ours(context.strategy) or context.strategy.size == 1:
        return None
    return context.strategy


def unwrapped(optimizer: Any) -> Any:
    """Returns the optimizer inside a LossScaleOptimizer; any other as it is."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def own_reduction(optimizer: Any) -> Any:
    """Returns what an optimizer reduces its gradients with where there is no Strategy, or None: an object that has
    `all_agree(bool)` and `is_active`.
    """
    return getattr(optimizer, "__dict__", {}).get("_ddl_reduction")


def optimizers_in(optimizer: Any) -> list[Any]:
    """Returns an optimizer and those inside it (LossScaleOptimizer, MultiOptimizer); none for a name or a config."""
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        return []
    inner = [getattr(optimizer, "inner_optimizer", None), *getattr(optimizer, "_inner_optimizers", ())]
    return [optimizer, *(each for one in inner for each in optimizers_in(one))]


def optimizers_with_rates(model: Any) -> list[Any]:
    """Returns a model's optimizers that have a learning rate, and not others inside of them that have."""
    return [part for each in optimizers_of(model) for part in optimizers_in(each) if len(optimizers_in(part)) == 1]


def weights_made_trainable(model: Any) -> dict[int, Any]:
    """Returns id -> variable of those that layers made to be trained, frozen or not; statistics are none of them."""
    own = [v for layer in model._flatten_layers() for v in getattr(layer, "_trainable_variables", ())]
    return {id(v): v for v in [*own, *model.trainable_variables]}


def layers_of(model: Any) -> list[Any]:
    """Returns the model and all layers inside it, however deep, also in Python lists. Keras has no public walk."""
    return model._flatten_layers()


def has_call(model: Any) -> bool:
    """Whether a model can be called; one with a training step of its own need not be."""
    return type(model).call is not keras.Model.call


def is_built(model: Any) -> bool:
    """Whether a model has its variables: also one that is never called, which Keras never says is built."""
    if model.built:
        return True
    return bool(model.variables) and (not has_call(model) or all(layer.built for layer in layers_of(model)[1:]))


def named_optimizers_of(model: Any) -> dict[str, Any]:
    """Returns name -> optimizer of all optimizers of a model, each once: the compiled one first, and those that it or a
    layer of it keeps as an attribute, also in a list or a dict, as models with a training step of their own do.
    """
    found: dict[str, Any] = {}
    seen: set[int] = set()

    def take(name: str, value: Any) -> None:
        if isinstance(value, keras.optimizers.Optimizer):
            if id(value) not in seen:
                seen.update(id(each) for each in optimizers_in(value))
                found[name] = value
        elif isinstance(value, dict):
            for key in value:
                take(f"{name}/{key}", value[key])
        elif isinstance(value, (list, tuple)):
            for number, each in enumerate(value):
                take(f"{name}/{number}", each)

    take("optimizer", getattr(model, "optimizer", None))
    for number, owner in enumerate([model, *model._flatten_layers(include_self=False)]):
        for name, value in list(vars(owner).items()):
            # Keras's own lists of layers and variables hold none, and are long.
            if isinstance(value, keras.optimizers.Optimizer) or not name.startswith("_"):
                take(name if number == 0 else f"layer {number}/{name}", value)
    return found


def optimizers_of(model: Any) -> list[Any]:
    """Returns all optimizers of a model (`named_optimizers_of`)."""
    return list(named_optimizers_of(model).values())


def accumulators_of(model: Any) -> list[Any]:
    """Returns the variables in which a model's optimizers accumulate gradients between updates."""
    parts = [each for one in optimizers_of(model) for each in optimizers_in(one)]
    lists = [getattr(each, "_accumulated_gradients", None) or [] for each in parts]
    return [variable for variables in lists for variable in variables if variable is not None]


def accumulates(model: Any) -> bool:
    """Whether an optimizer of the model updates once for several steps."""
    parts = [each for one in optimizers_of(model) for each in optimizers_in(one)]
    return any(getattr(each, "gradient_accumulation_steps", None) for each in parts)


def is_accumulating(model: Any) -> bool:
    """Whether an optimizer of the model is between two updates, with gradients accumulated for the second."""
    for one in optimizers_of(model):
        for each in optimizers_in(one):
            steps = each.gradient_accumulation_steps
            if steps and int(keras.ops.convert_to_numpy(each._iterations)) % steps:
                return True
    return False


def rows_counted(model: Any) -> float:
    """Returns the rows that a model has seen since its metrics were reset; 0 when its steps do not count them."""
    count = getattr(getattr(model, "_loss_tracker", None), "count", None)
    return 0.0 if count is None else float(keras.ops.convert_to_numpy(count))


def metrics_in(model: Any) -> list[Any]:
    """Returns a model's metric objects: those it tracks, and those given to compile, also when not built yet."""
    compiled = getattr(model, "_compile_metrics", None)
    given = [tree.flatten(getattr(compiled, name, None)) for name in ("_user_metrics", "_user_weighted_metrics")]
    tracked = [each for metric in model.metrics for each in getattr(metric, "metrics", [metric])]
    return [each for each in [*tracked, *(one for some in given for one in some)] if not isinstance(each, (str, type))]


def metric_variables(model: Any) -> list[Any]:
    """Returns the variables of a model's metrics, and of those inside them, each once."""
    found: dict[int, Any] = {}
    pending = list(model.metrics)
    while pending:
        metric = pending.pop(0)
        if id(metric) not in found:
            found[id(metric)] = metric
            pending.extend([*getattr(metric, "_metrics", []), *(getattr(metric, "metrics", None) or [])])
    variables = [each for metric in found.values() for each in getattr(metric, "_variables", [])]
    return list({id(each): each for each in variables}.values())


def plain_name(name: str) -> str:
    """Returns a name or path without the numbers that Keras appends: "dense_2/kernel" gives "dense/kernel".

    Keras counts objects by process, and a rank may have made another model before. What ranks match by must not
    depend on that.
    """
    return re.sub(r"_\d+(?=[/_]|$)", "", name)


def global_seed_generator() -> Any:
    """Returns the generator behind `seed=None` of keras.random, or None if nothing has used it yet."""
    return _global_state.get_global_attribute(_GLOBAL_SEED_GENERATOR)


def make_global_seed_generator() -> Any:
    """Returns that generator; makes it, without a draw from Python's random numbers, if nothing has used it yet."""
    if global_seed_generator() is None:
        _global_state.set_global_attribute(_GLOBAL_SEED_GENERATOR, keras.random.SeedGenerator(0))
    return global_seed_generator()


def forget_global_seed_generator() -> None:
    """Lets Keras make that generator anew when it is used next."""
    _global_state.set_global_attribute(_GLOBAL_SEED_GENERATOR, None)


def layer_state(model: Any) -> list[Any]:
    """Returns the variables in which layers keep what they gather in calls: made as not trainable, no seeds."""
    found = [each for layer in model._flatten_layers() for each in layer._non_trainable_variables]
    return list({id(each): each for each in found}.values())
