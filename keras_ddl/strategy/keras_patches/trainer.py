"""Patches of Keras's Trainer: fit, evaluate, predict and compile for models made under a keras_ddl.Strategy.

Patched: keras/src/trainers/trainer.py, backend/tensorflow/trainer.py (3.15.1).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from keras_ddl.communicator import stack_position
from keras_ddl.compat import keras as keras_compat
from keras_ddl.compat.tensorflow import tf
from keras_ddl.errors import ConfigError
from keras_ddl.strategy import agreement, data, layer_state, metric_state, step
from keras_ddl.strategy.data import arrays, order
from keras_ddl.strategy.keras_patches import metric_results
from keras_ddl.strategy.keras_patches.optimizer import outside_message
from keras_ddl.strategy.keras_patches.saving import mark_state_local
from keras_ddl.strategy.thread_value import ThreadValue

_evaluating, _local = ThreadValue(False), ThreadValue(False)


def compile_model(original: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles inside the scope, so that compile("adam") may stand outside it; refuses what would go wrong later."""

    def wrapper(self, optimizer="rmsprop", *args, **kwargs):
        strategy = keras_compat.strategy_of(self)
        _check_model(self, strategy)
        for part in keras_compat.optimizers_in(optimizer):
            theirs = keras_compat.strategy_of(part)
            if strategy is None and theirs is not None:
                raise ConfigError(outside_message("A model", self.name, theirs))
            if strategy is not None and keras_compat.own_reduction(part) is not None:
                raise ConfigError(
                    "Gradients are reduced once. Received: a model made under a keras_ddl.Strategy and optimizer "
                    f"{part.name!r}, which reduces gradients itself (rank {strategy.rank}). Use the plain optimizer, "
                    "made under the scope, or leave out the Strategy."
                )
            if strategy is not None and theirs is not strategy:
                raise ConfigError(outside_message("An optimizer", part.name, strategy, theirs))
        if strategy is None:
            if any(keras_compat.own_reduction(part) is not None for part in keras_compat.optimizers_in(optimizer)):
                bound = _without_jit(original, self, optimizer, args, kwargs)
                return original(*bound.args, **bound.kwargs)
            return original(self, optimizer, *args, **kwargs)
        bound = inspect.signature(original).bind(self, optimizer, *args, **kwargs)
        if bound.arguments.get("jit_compile") is True:
            raise ConfigError(
                "jit_compile=True cannot be used under a keras_ddl.Strategy: XLA has no kernel for its collectives. "
                f"Received: jit_compile=True for model {self.name!r} (rank {strategy.rank}). Leave it out, or use "
                "jit_compile=False."
            )
        self.__dict__.pop("_ddl_local_predict", None)
        with strategy.scope():
            return original(self, optimizer, *args, **kwargs)

    return wrapper


def _without_jit(original: Callable[..., Any], model: Any, optimizer: Any, args: Any, kwargs: Any) -> Any:
    """Binds the arguments, for an optimizer that reduces gradients itself: jit_compile="auto" means no.

    Scripts with such an optimizer say experimental_run_tf_function=False, which Keras does not know any more: Horovod
    asked for it.
    """
    kwargs = {name: value for name, value in kwargs.items() if name != "experimental_run_tf_function"}
    try:
        bound = inspect.signature(original).bind(model, optimizer, *args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{type(model).__name__}.compile() {error}") from None
    if bound.arguments.get("jit_compile") is True:
        raise ConfigError(
            "jit_compile=True cannot be used with an optimizer that reduces gradients: XLA has no kernel for "
            f"collectives. Received: jit_compile=True for model {model.name!r}. Leave it out, or use jit_compile=False."
        )
    bound.arguments["jit_compile"] = False
    return bound


def _check_model(model: Any, strategy: Any) -> None:
    """Raises ConfigError when a model made outside is used inside a scope; warns when it is used beside one."""
    if strategy is not None:
        return
    current = keras_compat.scope_strategy()
    if current is not None:
        raise ConfigError(outside_message("A model", model.name, current))


def _warn_if_alone(model: Any) -> None:
    others = [strategy for strategy in keras_compat.strategies if strategy.size > 1]
    if others and not model.__dict__.get("_ddl_warned"):
        model.__dict__["_ddl_warned"] = True
        stack_position.warn(
            f"Model {model.name!r} was made outside the scope of the keras_ddl.Strategy of this process: rank "
            f"{others[0].rank} trains it alone, on all of the data. Make it under `with strategy.scope():` to train "
            "it on all ranks."
        )
    elif _trains_unreduced(model) and not model.__dict__.get("_ddl_warned"):
        model.__dict__["_ddl_warned"] = True
        stack_position.warn(
            f"Optimizer {model.optimizer.name!r} of model {model.name!r} does not reduce gradients, and others of this "
            "process do: each rank trains this model alone. What is loaded, cloned, unpickled or made from a "
            "configuration has a plain optimizer: compile the model with a DistributedOptimizer."
        )


def _trains_unreduced(model: Any) -> bool:
    """Whether Keras's own step would apply this rank's gradients, where the program has them reduced elsewhere."""
    parts = keras_compat.optimizers_in(getattr(model, "optimizer", None))
    if not parts or _is_own(type(model).train_step):
        return False
    if any(keras_compat.own_reduction(part) is not None for part in parts):
        return False
    return any(reduction.is_active for reduction in keras_compat.reductions)


def fit(original: Callable[..., Any]) -> Callable[..., Any]:
    """Agrees on random states before, keeps the ranks' decisions to stop together, reports errors as keras_ddl's."""

    def wrapper(self, *args, **kwargs):
        strategy = keras_compat.strategy_of(self)
        _check_model(self, strategy)
        if strategy is None:
            _warn_if_alone(self)
            return original(self, *args, **kwargs)
        bound = _bind(original, self, args, kwargs, strategy)
        if strategy.size == 1:
            return original(*bound.args, **bound.kwargs)
        layer_state.check(self, strategy.rank)
        with order.translate_errors(), _in_fit(self):
            strategy.random_state.agree()
            return original(*bound.args, **bound.kwargs)

    return wrapper


def _among_ranks(body: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a patch of `body(model, strategy, call, kwargs)`, for several ranks; call() is the method as it was."""

    @functools.wraps(body)
    def patch(original):
        def wrapper(self, *args, **kwargs):
            strategy = keras_compat.strategy_of(self)
            _check_model(self, strategy)
            if strategy is None or strategy.size == 1:
                return original(self, *args, **kwargs)
            bound = _bind(original, self, args, kwargs, strategy)
            with order.translate_errors():
                return body(self, strategy, lambda: original(*bound.args, **bound.kwargs), kwargs)

        return wrapper

    return patch


@_among_ranks
def evaluate(model: Any, strategy: Any, call: Callable[[], Any], kwargs: dict[str, Any]) -> Any:
    """Agrees on the state of layers before (in fit that has just been done); the metrics are those of all rows."""
    if not kwargs.get("_use_cached_eval_dataset", False):
        layer_state.agree(model, strategy.size)
    with _evaluating.set_to(True):
        return call()


@_among_ranks
def predict(model: Any, strategy: Any, call: Callable[[], Any], kwargs: dict[str, Any]) -> Any:
    """Returns the rows of all ranks, in order, on every rank, or on rank 0 (`Strategy(gather_predictions=)`)."""
    layer_state.agree(model, strategy.size)
    return call()


def on_batch(original: Callable[..., Any]) -> Callable[..., Any]:
    """train_on_batch, test_on_batch: each rank passes its own rows; all get the loss and metrics of all rows.

    A script for one process passes the same rows on every rank: the first call looks for that, and warns.
    """

    def wrapper(self, *args, **kwargs):
        strategy = keras_compat.strategy_of(self)
        if strategy is None or strategy.size == 1:
            return original(self, *args, **kwargs)
        bound = inspect.signature(original).bind(self, *args, **kwargs)
        arrays.warn_of_equal_batches((bound.arguments["x"], bound.arguments.get("y")), strategy.rank)
        as_dict = bound.arguments.get("return_dict", False)
        bound.arguments["return_dict"] = True
        if original.__name__ == "train_on_batch":
            mark_state_local(self)
        with order.translate_errors():
            logs = original(*bound.args, **bound.kwargs)
            logs = keras_compat.pythonify_logs(global_logs_of(self, logs, strategy))
        return logs if as_dict else self._flatten_metrics_in_order(logs)

    return wrapper


def predict_on_batch(original: Callable[..., Any]) -> Callable[..., Any]:
    """Stays on this rank: the predictions of the rows it was given, and no waiting for other ranks."""

    def wrapper(self, x):
        strategy = keras_compat.strategy_of(self)
        if strategy is None or strategy.size == 1:
            return original(self, x)
        shared = self.predict_function
        self.predict_function = self.__dict__.get("_ddl_local_predict")
        try:
            with order.translate_errors(), _without_row_counts(strategy), _local.set_to(True):
                return original(self, x)
        finally:
            self.__dict__["_ddl_local_predict"] = self.predict_function
            self.predict_function = shared

    return wrapper


def get_metrics_result_or_logs(original: Callable[..., Any]) -> Callable[..., Any]:
    """The end of an epoch or of an evaluation: logs over all ranks, and before validation one set of statistics."""

    def wrapper(self, logs):
        logs = logs or self.__dict__.get("_ddl_logs_before", logs)  # an epoch that is resumed after its last batch
        strategy = keras_compat.strategy_of(self)
        if strategy is None or strategy.size == 1:
            return original(self, logs)
        order.warn_of_unlike_values(strategy.rank)
        if not _evaluating.get():  # so this is the end of an epoch of fit
            layer_state.agree(self, strategy.size)
            agreement.collect_accumulated_gradients(keras_compat.accumulators_of(self), strategy.rank)
        return global_logs_of(self, logs, strategy, original)

    return wrapper


def global_logs_of(model: Any, logs: Any, strategy: Any, rule: Callable[..., Any] | None = None) -> Any:
    """Returns a step's or epoch's logs over all ranks. COLLECTIVE."""
    if not isinstance(logs, dict):
        return logs
    rule = rule or keras_compat.Trainer._get_metrics_result_or_logs.__wrapped__
    share = float(strategy.extended.share.share())
    with metric_results.of_this_rank():
        return agreement.global_logs(model, logs, strategy.rank, strategy.size, share, lambda local: rule(model, local))


def reduce_per_replica(original: Callable[..., Any]) -> Callable[..., Any]:
    """Gathers predictions. Logs of a step stay this rank's; those of an epoch are made from summed metrics."""

    def wrapper(values, strategy, reduction):
        if not keras_compat.is_ours(strategy) or strategy.size == 1:
            return original(values, strategy, reduction)
        if reduction != "concat" or _local.get():
            return values
        leaves = keras_compat.tree.flatten(values)
        name = "predict"
        if strategy.gather_predictions == "rank0" and strategy.rank != 0:
            for i, leaf in enumerate(leaves):
                data.gather_rows(leaf, strategy.rank, name=f"{name}_{i}")  # rank 0 waits for these
            return values
        gathered = [data.gather_rows(leaf, strategy.rank, name=f"{name}_{i}") for i, leaf in enumerate(leaves)]
        return keras_compat.tree.pack_sequence_as(values, gathered)

    return wrapper


def _bind(original: Callable[..., Any], model: Any, args: Any, kwargs: Any, strategy: Any) -> inspect.BoundArguments:
    """Binds the arguments; the progress bar is rank 0's, whatever `verbose` the one script asks for."""
    bound = inspect.signature(original).bind(model, *args, **kwargs)
    if strategy.rank != 0:
        bound.arguments["verbose"] = 0
    return bound


def make_function(original: Callable[..., Any]) -> Callable[..., Any]:
    """train_step and test_step know that Keras calls them: `step.current()`."""

    def _make_function(self, step_function):
        strategy = keras_compat.strategy_of(self)
        if strategy is None or strategy.size == 1:
            return original(self, step_function)
        return original(self, in_step(self, step_function))

    return _make_function


def in_step(model: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `function`, a train_step or test_step of `model`, such that it means what it means in one process."""

    @tf.autograph.experimental.do_not_convert
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        running = step.innermost()
        running.model = model
        if tf.executing_eagerly():
            _warn_of_eager_steps(model, running)
        return _estimates(running, function(*args, **kwargs))

    return wrapper


def as_step(function: Any) -> Any:
    """Returns what `strategy.run` is to call: a model's train_step or test_step as `fit` calls it, others as is."""
    model = getattr(function, "__self__", None)
    if isinstance(model, keras_compat.Trainer) and getattr(function, "__name__", "") in ("train_step", "test_step"):
        return in_step(model, function)
    return function


def _warn_of_eager_steps(model: Any, running: step.Step) -> None:
    """Without a graph nothing tells a sum over rows from a mean."""
    names = ("train_step", "test_step", "compute_loss")
    own = [f"{type(model).__name__}.{name}" for name in names if _is_own(getattr(type(model), name, None))]
    own += [f"metric {metric.name!r}" for metric in metric_state.flat(model.metrics) if metric_state.is_own(metric)]
    running.values.warn_unread(", ".join(own) or f"model {model.name!r}")


def _is_own(method: Any) -> bool:
    return method is not None and not method.__module__.startswith("keras.src.")


def _estimates(running: step.Step, logs: Any) -> Any:
    """Numbers that a step has computed itself, so that the mean over ranks, weighed by rows, is that of one process."""
    if not isinstance(logs, dict):
        return logs

    def one(value):
        if not isinstance(value, tf.Tensor) or value.shape.rank != 0 or not value.dtype.is_floating:
            return value
        return running.values.estimate(value)

    return keras_compat.tree.map_structure(one, logs)


@contextlib.contextmanager
def _in_fit(model: Any) -> Iterator[None]:
    # Both: Keras's own `self.stop_training = False` does nothing where reading it gives False already.
    model.__dict__["_ddl_agreed_stop"] = model.__dict__["stop_training"] = False
    try:
        yield
    finally:
        model.__dict__["stop_training"] = model.__dict__.pop("_ddl_agreed_stop", False)


@contextlib.contextmanager
def _without_row_counts(strategy: Any) -> Iterator[None]:
    before, strategy.extended.counts_rows = strategy.extended.counts_rows, False
    try:
        yield
    finally:
        strategy.extended.counts_rows = before


def _get_stop_training(model: Any) -> bool:
    state = model.__dict__
    if "_ddl_agreed_stop" in state:
        return state["_ddl_agreed_stop"]
    try:
        return state["stop_training"]
    except KeyError:
        raise AttributeError(f"{type(model).__name__!r} object has no attribute 'stop_training'") from None


def _set_stop_training(model: Any, value: bool) -> None:
    model.__dict__["stop_training"] = value


def stop_on_all_ranks(model: Any) -> None:
    """Stops training after this batch. To be called by all ranks alike, which then need not agree on it."""
    model.stop_training = True
    if "_ddl_agreed_stop" in model.__dict__:
        model.__dict__["_ddl_agreed_stop"] = True


# Inside fit, reading gives what the ranks have agreed on, so that a rank that asks to stop, at whatever moment and
# from whatever thread, does not leave the others waiting for it.
STOP_TRAINING = property(_get_stop_training, _set_stop_training)
