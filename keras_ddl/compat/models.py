"""Answers questions about a model, its optimizers, layers and metrics, partly from Keras's private interfaces."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable, Iterable
from typing import Any

from keras_ddl.compat import replacing
from keras_ddl.compat.keras import keras, tree


def layers_of(model: Any) -> list[Any]:
    """Returns the model and all layers inside it, at any depth and in lists; Keras has no public function for this."""
    return list(model._flatten_layers())


def has_call(model: Any) -> bool:
    """Whether a model can be called; a model with its own training step need not have a `call`."""
    return type(model).call is not keras.Model.call


def has_keras_train_step(model: Any) -> bool:
    """Whether a model is trained by Keras's own train_step, which updates all trainable variables."""
    return bool(model.train_step.__module__.startswith("keras.src."))


def is_built(model: Any) -> bool:
    """Whether a model has its variables. Keras does not mark a model as built if it is never called."""
    if model.built:
        return True
    return bool(model.variables) and (not has_call(model) or all(layer.built for layer in layers_of(model)[1:]))


def build_config(model: Any) -> dict[str, Any] | None:
    """Returns the shapes that a model was built with, if it has recorded them, for `build_as` in another process."""
    try:
        config: dict[str, Any] | None = model.get_build_config()
    except Exception:  # the model's code may raise anything
        return None
    return config


def build_as(model: Any, config: dict[str, Any] | None) -> None:
    """Builds a model that is not built yet, with the shapes of another one, as far as possible."""
    if config is not None and not is_built(model):
        with contextlib.suppress(Exception), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Keras warns if the model cannot be built
            model.build_from_config(config)


def weights_made_trainable(model: Any) -> dict[int, Any]:
    """Returns id -> variable of the weights that layers created as trainable, even if now frozen; no statistics."""
    own = [v for layer in model._flatten_layers() for v in getattr(layer, "_trainable_variables", ())]
    return {id(v): v for v in [*own, *model.trainable_variables]}


def layer_with(model: Any, variable: Any) -> Any:
    """Returns the layer of a model, or the model itself, that made a variable as its own weight; None: no layer did."""
    for layer in layers_of(model):
        own = (*getattr(layer, "_trainable_variables", ()), *getattr(layer, "_non_trainable_variables", ()))
        if any(each is variable for each in own):
            return layer
    return None


def attribute_with(model: Any, holds: Callable[[Any], bool]) -> tuple[Any, str] | None:
    """Returns a layer, or the model itself, and the name of its attribute for which `holds` is true, or None.

    holds: tests a value. Items of lists and dicts are tested too, e.g. "tables['words']".
    """

    def names(name: str, value: Any, depth: int) -> Iterable[str]:
        if holds(value):
            yield name
        elif depth and isinstance(value, dict):
            yield from (found for key in value for found in names(f"{name}[{key!r}]", value[key], depth - 1))
        elif depth and isinstance(value, (list, tuple)):
            yield from (found for i, each in enumerate(value) for found in names(f"{name}[{i}]", each, depth - 1))
        elif depth and not isinstance(value, (keras.layers.Layer, str, type)) and hasattr(value, "__dict__"):
            own = list(vars(value).items()) if not callable(value) else []
            yield from (found for key, each in own for found in names(f"{name}.{key}", each, 0))

    for layer in layers_of(model):
        for name, value in sorted(vars(layer).items(), key=lambda item: item[0].startswith("_")):  # Keras's own last
            if (found := next(iter(names(name, value, 2)), None)) is not None:
                return layer, found
    return None


def reduction_axes(layer: keras.layers.BatchNormalization) -> list[int]:
    return list(layer._reduction_axes)


def metric_direction(metric: Any) -> str | None:
    """Returns 'min' or 'max', whichever is better for a metric; None if the metric does not declare it."""
    direction = getattr(metric, "_direction", None)
    return None if direction is None else "max" if direction == "up" else "min"


def layer_state(model: Any) -> list[Any]:
    """Returns the variables in which layers collect state during calls: non-trainable ones, except seeds."""
    variables = [each for layer in model._flatten_layers() for each in layer._non_trainable_variables]
    return list({id(each): each for each in variables}.values())


def inner_variable(variable: Any) -> Any:
    """Returns the tf.Variable with a Keras variable's value; None if it has no value yet or is no Keras variable."""
    return getattr(variable, "_value", None)


def declared_shape(variable: Any) -> tuple[int, ...] | None:
    """Returns the declared shape of a Keras variable that has no value yet; None: its value has the shape."""
    shape = getattr(variable, "_shape", None)
    return None if shape is None else tuple(shape)


def replace_inner_variable(variable: Any, value: Any) -> None:
    """Makes a Keras variable hold its value in another tf.Variable."""
    variable._value = value


def forget_functions(model: Any) -> None:
    """Makes a model build the functions of its steps again, as `compile` does."""
    model.train_function = model.test_function = model.predict_function = None


def unwrapped(optimizer: Any) -> Any:
    """Returns the optimizer inside a LossScaleOptimizer; any other optimizer unchanged."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def optimizers_in(optimizer: Any) -> list[Any]:
    """Returns an optimizer and its inner optimizers (LossScaleOptimizer, MultiOptimizer); [] for a name or a config."""
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        return []
    inner = [getattr(optimizer, "inner_optimizer", None), *getattr(optimizer, "_inner_optimizers", ())]
    return [optimizer, *(each for one in inner for each in optimizers_in(one))]


def named_optimizers_of(model: Any) -> dict[str, Any]:
    """Returns name -> optimizer of all optimizers of a model, each once, the compiled one first.

    The others are in attributes of the model or its layers, also in lists and dicts, as in models with their own step.
    """
    optimizers: dict[str, Any] = {}
    seen: set[int] = set()

    def take(name: str, value: Any) -> None:
        if isinstance(value, keras.optimizers.Optimizer):
            if id(value) not in seen:
                seen.update(id(each) for each in optimizers_in(value))
                optimizers[name] = value
        elif isinstance(value, dict):
            for key in value:
                take(f"{name}/{key}", value[key])
        elif isinstance(value, (list, tuple)):
            for number, each in enumerate(value):
                take(f"{name}/{number}", each)

    take("optimizer", getattr(model, "optimizer", None))
    for number, owner in enumerate([model, *model._flatten_layers(include_self=False)]):
        for name, value in list(vars(owner).items()):
            # Skip Keras's own lists of layers and variables, which are long and hold no optimizers.
            if isinstance(value, keras.optimizers.Optimizer) or not name.startswith("_"):
                take(name if number == 0 else f"layer {number}/{name}", value)
    return optimizers


def optimizers_of(model: Any) -> list[Any]:
    """Returns all optimizers of a model (`named_optimizers_of`)."""
    return list(named_optimizers_of(model).values())


def optimizers_with_rates(model: Any) -> list[Any]:
    """Returns a model's outermost optimizers that have a learning rate."""
    return [part for each in optimizers_of(model) for part in optimizers_in(each) if len(optimizers_in(part)) == 1]


def steps_taken(optimizers: Iterable[Any]) -> int | None:
    """Returns the largest number of steps that one of these optimizers has taken; None without optimizers."""
    return max((int(each.iterations.numpy()) for each in optimizers), default=None)


def accumulators_of(model: Any) -> list[Any]:
    """Returns the variables in which a model's optimizers accumulate gradients between updates."""
    parts = [each for one in optimizers_of(model) for each in optimizers_in(one)]
    lists = [getattr(each, "_accumulated_gradients", None) or [] for each in parts]
    return [variable for variables in lists for variable in variables if variable is not None]


def accumulates(model: Any) -> bool:
    """Whether an optimizer of the model updates once every several steps."""
    parts = [each for one in optimizers_of(model) for each in optimizers_in(one)]
    return any(getattr(each, "gradient_accumulation_steps", None) for each in parts)


def is_accumulating(model: Any) -> bool:
    """Whether an optimizer of the model is between two updates, with gradients accumulated for the next one."""
    for one in optimizers_of(model):
        for each in optimizers_in(one):
            steps = getattr(each, "gradient_accumulation_steps", None)
            if steps and int(keras.ops.convert_to_numpy(each._iterations)) % steps:
                return True
    return False


def rows_counted(model: Any) -> float:
    """Returns the rows that a model has seen since its metrics were reset; 0 if its steps do not count them."""
    count = getattr(getattr(model, "_loss_tracker", None), "count", None)
    return 0.0 if count is None else float(keras.ops.convert_to_numpy(count))


def metrics_in(model: Any) -> list[Any]:
    """Returns a model's metrics, both tracked and passed to compile, built or not."""
    compiled = getattr(model, "_compile_metrics", None)
    compiled_metrics = [
        tree.flatten(getattr(compiled, name, None)) for name in ("_user_metrics", "_user_weighted_metrics")
    ]
    tracked = [each for metric in model.metrics for each in getattr(metric, "metrics", [metric])]
    return [
        each
        for each in [*tracked, *(one for some in compiled_metrics for one in some)]
        if not isinstance(each, (str, type))
    ]


def written_by_steps(model: Any) -> list[Any]:
    """Returns all variables of Keras that a step of `model` may write."""
    optimizers = [each for optimizer in optimizers_of(model) for each in optimizer.variables]
    return list({id(each): each for each in (*model.variables, *optimizers, *metric_variables(model))}.values())


def metric_variables(model: Any) -> list[Any]:
    """Returns the variables of a model's metrics and of their inner metrics, each once."""
    return _variables_of_metrics(model.metrics)


def metric_variables_by_part(model: Any) -> dict[str, list[Any]]:
    """Returns the metric variables, grouped into parts that are built at different times.

    The first batch builds the metrics of compile(). Once a part is built, its variables keep their order.
    """
    compiled = compiled_parts(model)
    parts: dict[str, list[Any]] = {"own": [], **{name: [] for name in compiled}}
    for metric in model.metrics:
        name = next((name for name, part in compiled.items() if any(metric is e for e in (part, *part.metrics))), "own")
        parts[name].append(metric)
    return {name: _variables_of_metrics(metrics) for name, metrics in parts.items()}


def compiled_parts(model: Any) -> dict[str, Any]:
    """Returns the objects that compile() made from losses and metrics; the first batch makes their variables."""
    parts = {"losses": getattr(model, "_compile_loss", None), "metrics": getattr(model, "_compile_metrics", None)}
    return {name: part for name, part in parts.items() if part is not None}


def after_build(part: Any, call: Callable[[], None]) -> None:
    """Calls `call`, now or later, when a part of `compiled_parts` has its variables but no batch has written them."""
    if part.built:
        call()
        return

    def build(*args: Any, **kwargs: Any) -> None:
        undo()
        part.build(*args, **kwargs)
        call()

    undo = replacing.set_values([(part, "build", build)])


def _variables_of_metrics(metrics: Iterable[Any]) -> list[Any]:
    seen: dict[int, Any] = {}
    pending = list(metrics)
    while pending:
        metric = pending.pop(0)
        if id(metric) not in seen:
            seen[id(metric)] = metric
            pending.extend([*getattr(metric, "_metrics", []), *(getattr(metric, "metrics", None) or [])])
    variables = [each for metric in seen.values() for each in getattr(metric, "_variables", [])]
    return list({id(each): each for each in variables}.values())
