"""Patches of Keras's Trainer: fit, evaluate, predict and compile for models made under a keras_ddl.Strategy.

Patched: keras/src/trainers/trainer.py, backend/tensorflow/trainer.py (3.15.1).
"""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from keras_ddl.communicator import stack_position
from keras_ddl.compat import keras as keras_compat
from keras_ddl.compat import models
from keras_ddl.compat.tensorflow import tf
from keras_ddl.data import arrays, order
from keras_ddl.data.rows import BatchRows
from keras_ddl.errors import ConfigError
from keras_ddl.gradients import own_reductions
from keras_ddl.strategy import fits, one_per_job
from keras_ddl.strategy.keras_patches import reading
from keras_ddl.strategy.keras_patches.callbacks import adopted
from keras_ddl.strategy.one_per_job import outside_message
from keras_ddl.strategy.shards import gathered_slots
from keras_ddl.strategy.step import accumulation, keras_step
from keras_ddl.strategy.step.batch_kinds import (
    BatchKind,
    BatchKinds,
    global_batch,
    of_single_batches,
    total_rows,
    trace_for_all,
)
from keras_ddl.strategy.step.failing_together import together

_warned: weakref.WeakSet[Any] = weakref.WeakSet()  # models that train alone


def compile_model(original: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles inside the scope, so that compile("adam") may stand outside it; refuses what would go wrong later."""

    def wrapper(self: Any, optimizer: Any = "rmsprop", *args: Any, **kwargs: Any) -> Any:
        strategy = keras_compat.strategy_of(self)
        _check_model(self, strategy)
        for part in models.optimizers_in(optimizer):
            theirs = keras_compat.strategy_of(part)
            if strategy is None and theirs is not None:
                raise ConfigError(outside_message("A model", self.name, theirs))
            if strategy is not None and own_reductions.reduction_of(part) is not None:
                raise ConfigError(
                    "Gradients must be reduced only once. Received: a model made under a keras_ddl.Strategy and "
                    "optimizer "
                    f"{part.name!r}, which reduces gradients itself (rank {strategy.rank}). Use the plain optimizer, "
                    "made under the scope, or leave out the Strategy."
                )
            if strategy is not None and theirs is not strategy:
                raise ConfigError(outside_message("An optimizer", part.name, strategy, theirs))
        if strategy is None:
            if any(own_reductions.reduction_of(part) is not None for part in models.optimizers_in(optimizer)):
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
    """Raises ConfigError when a model made outside a scope is used inside one."""
    if strategy is not None:
        return
    current = keras_compat.scope_strategy()
    if current is not None:
        raise ConfigError(outside_message("A model", model.name, current))


def _warn_if_alone(model: Any) -> None:
    others = [strategy for strategy in one_per_job.alive() if strategy.size > 1]
    if others and model not in _warned:
        _warned.add(model)
        stack_position.warn(
            f"Model {model.name!r} was made outside the scope of the keras_ddl.Strategy of this process: rank "
            f"{others[0].rank} trains it alone, on all of the data. Make it under `with strategy.scope():` to train "
            "it on all ranks."
        )
    elif _trains_unreduced(model) and model not in _warned:
        _warned.add(model)
        stack_position.warn(
            f"Optimizer {model.optimizer.name!r} of model {model.name!r} does not reduce gradients, and others of this "
            "process do: each rank trains this model alone. What is loaded, cloned, unpickled or made from a "
            "configuration has a plain optimizer: compile the model with a DistributedOptimizer."
        )


def _trains_unreduced(model: Any) -> bool:
    """Whether Keras's own step would apply this rank's gradients, where the program has them reduced elsewhere."""
    parts = models.optimizers_in(getattr(model, "optimizer", None))
    if not parts or not models.has_keras_train_step(model):
        return False
    if any(own_reductions.reduction_of(part) is not None for part in parts):
        return False
    return own_reductions.any_is_active()


def fit(original: Callable[..., Any]) -> Callable[..., Any]:
    """Agrees on random states before, keeps the ranks' decisions to stop together, reports errors as keras_ddl's."""

    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        strategy = keras_compat.strategy_of(self)
        _check_model(self, strategy)
        with reading.Reader(self, trains=True).as_current(), fits.running(self) as fit:
            if strategy is None:
                _warn_if_alone(self)
                return original(self, *args, **kwargs)
            bound = _bind(original, self, args, kwargs, strategy)
            if strategy.size == 1:
                return original(*bound.args, **bound.kwargs)
            with order.translate_errors(), _in_fit(self, fit):
                accumulation.combine(self)  # what a fit that was broken off has left
                strategy.random_state.agree()
                return original(*bound.args, **bound.kwargs)

    return wrapper


def evaluate_or_predict(original: Callable[..., Any]) -> Callable[..., Any]:
    """The same on all ranks; the progress bar is rank 0's."""

    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        strategy = keras_compat.strategy_of(self)
        _check_model(self, strategy)
        if strategy is None or strategy.size == 1:
            return original(self, *args, **kwargs)
        bound = _bind(original, self, args, kwargs, strategy)
        with order.translate_errors(), reading.Reader(self).as_current():
            return original(*bound.args, **bound.kwargs)

    return wrapper


def get_metrics_result_or_logs(original: Callable[..., Any]) -> Callable[..., Any]:
    """The end of an epoch or of an evaluation."""

    def wrapper(self: Any, logs: Any) -> Any:
        fit, strategy = fits.of(self), keras_compat.strategy_of(self)
        if fit is not None:
            logs = logs or fit.logs_before or logs  # an epoch that is resumed after its last batch
        if strategy is not None and strategy.size > 1:
            order.warn_of_unlike_values(strategy.rank)
            reader = reading.current()
            if reader is not None and reader.trains:
                accumulation.combine(self)
        return original(self, logs)

    return wrapper


def _bind(original: Callable[..., Any], model: Any, args: Any, kwargs: Any, strategy: Any) -> inspect.BoundArguments:
    """Binds the arguments; the progress bar is rank 0's, whatever `verbose` the one script asks for."""
    bound = inspect.signature(original).bind(model, *args, **kwargs)
    if strategy.rank != 0:
        bound.arguments["verbose"] = 0
    bound.arguments["callbacks"] = adopted(bound.arguments.get("callbacks"))
    return bound


def make_function(original: Callable[..., Any]) -> Callable[..., Any]:
    """train_step and test_step are traced for batches of as many rows as one process would see (keras_step.py)."""

    def _make_function(self: Any, step_function: Any) -> Any:
        strategy = keras_compat.strategy_of(self)
        if strategy is None or strategy.size == 1:
            return original(self, step_function)
        kinds = BatchKinds()
        undo = _Undo(self, strategy, kinds)

        name = _name_of(self, step_function)

        def run(iterator: Any) -> Any:
            if name != "test_step":
                gathered_slots.refuse_step(name, lambda: gathered_slots.slots_of(self))
            if isinstance(iterator, tf.data.Iterator):
                in_fit = name == "train_step" and fits.of(self) is not None
                if in_fit:
                    accumulation.begin_step(self, strategy.rank)
                kind, rows, part = kinds.of_iterator(iterator, reading.rows_of(iterator), in_fit, strategy)
                if rows.place not in kind.functions:
                    kind.functions[rows.place] = original(self, step_function)
                undo.has_called = True
                with keras_step.calling(self, name, rows, kind), order.translate_errors():
                    return kind.functions[rows.place](part)
            batch = next(iterator)
            arrays.warn_of_equal_batches(batch, strategy.rank)
            kind = kinds.of(global_batch(batch, total_rows(batch)))
            rows = BatchRows().of_kind(kind.specs)
            undo.has_called = True
            with keras_step.calling(self, name, rows, kind, is_single=True), order.translate_errors():
                if "single" not in kind.functions:
                    kind.functions["single"] = of_single_batches(self, step_function, batch, kind)
                return kind.functions["single"](batch)

        def function(iterator: Any) -> Any:
            undo.begin()
            try:
                return together(lambda: run(iterator), undo)
            except tf.errors.OutOfRangeError:
                undo.restore()
                if isinstance(iterator, tf.data.Iterator) and self.steps_per_execution == 1 and not self.run_eagerly:
                    traced = kinds.traced_for(iterator)
                    if traced is not None:
                        strategy.keras_steps.step_of(self, name).run_without_batch(traced)
                raise

        return function

    return _make_function


def _name_of(model: Any, step_function: Any) -> str:
    """Returns which step of `model` a function is; it may be the program's own, set in place of the method."""
    for name in ("train_step", "test_step"):
        if step_function == getattr(model, name):  # bound methods are equal, and not identical
            return name
    return "test_step" if getattr(step_function, "__name__", "") == "test_step" else "train_step"


class _Undo:
    """See failing_together.Undo. `kinds`: of the batches of a step of `model`, with what was traced for them."""

    def __init__(self, model: Any, strategy: Any, kinds: BatchKinds) -> None:
        self._model = weakref.ref(model)
        self._steps_of = strategy.keras_steps.steps_of
        self._kinds = kinds
        self.begin()

    def begin(self) -> None:
        """Begins a call."""
        self._traces = self._count()
        self.has_called = False  # the function, which may trace

    def _count(self) -> int:
        return sum(step.traces for step in self._steps_of(self._model()))

    def may_have_traced(self, is_python: bool) -> bool:
        return self._count() != self._traces or is_python and (self.has_called or not self._kinds)

    def restore(self) -> None:
        for step in self._steps_of(self._model()):
            step.restore()

    def forget_traces(self) -> None:
        self._kinds.clear()
        for step in self._steps_of(self._model()):
            step.forget_traces()


def make_predict_function(original: Callable[..., Any]) -> Callable[..., Any]:
    """As `make_function`, for predict_step. predict_on_batch stays on this rank: no waiting for other ranks."""

    def wrapper(self: Any, force: Any = False) -> Any:
        strategy = keras_compat.strategy_of(self)
        if strategy is None or strategy.size == 1:
            return original(self, force)
        if self.predict_function is not None and not force:
            return None
        kinds, alone = BatchKinds(), BatchKind("", ())
        undo = _Undo(self, strategy, kinds)

        def run(kind: Any, rows: Any, data_of_steps: Any) -> Any:
            undo.has_called = True
            with keras_step.calling(self, "predict_step", rows, kind), order.translate_errors():
                if rows.place not in kind.functions:
                    original(self, force=True)
                    kind.functions[rows.place], self.predict_function = self.predict_function, predict_function
                    if not rows.is_local:
                        trace_for_all(kind.functions[rows.place], data_of_steps, kind)
                return kind.functions[rows.place](data_of_steps)

        def run_on_all(rows: Any, data_of_steps: Any) -> Any:
            if rows.total is None or rows.spec is None:
                totals = [total_rows(each) if rows.total is None else rows.total for each in data_of_steps]
                specs = [global_batch(each, total) for each, total in zip(data_of_steps, totals)]
            else:
                specs = [rows.spec] * len(data_of_steps)
            kind = kinds.of(specs)
            return run(kind, rows.of_kind(kind.specs), data_of_steps)

        def predict_function(data_of_steps: Any) -> Any:
            reader = reading.current()
            if reader is None or reader.batch_rows is None:
                return run(alone, keras_step.LOCAL, data_of_steps)
            undo.begin()
            return together(lambda: run_on_all(reader.batch_rows, data_of_steps), undo)

        self.predict_function = predict_function
        return None

    return wrapper


@contextlib.contextmanager
def _in_fit(model: Any, fit: fits.Fit) -> Iterator[None]:
    # Both: Keras's own `self.stop_training = False` does nothing where reading it gives False already.
    fit.agreed_stop = model.__dict__["stop_training"] = False
    try:
        yield
    finally:
        model.__dict__["stop_training"], fit.agreed_stop = bool(fit.agreed_stop), None


def _get_stop_training(model: Any) -> bool:
    fit = fits.of(model)
    if fit is not None and fit.agreed_stop is not None:
        return fit.agreed_stop
    try:
        return model.__dict__["stop_training"]
    except KeyError:
        raise AttributeError(f"{type(model).__name__!r} object has no attribute 'stop_training'") from None


def _set_stop_training(model: Any, value: bool) -> None:
    model.__dict__["stop_training"] = value


def stop_on_all_ranks(model: Any) -> None:
    """Stops training after this batch. To be called by all ranks alike, which then need not agree on it."""
    model.stop_training = True
    fit = fits.of(model)
    if fit is not None and fit.agreed_stop is not None:
        fit.agreed_stop = True


# Inside fit, reading gives what the ranks have agreed on, so that a rank that asks to stop, at whatever moment and
# from whatever thread, does not leave the others waiting for it.
STOP_TRAINING = property(_get_stop_training, _set_stop_training)
