"""Patches of Keras's fit, evaluate and predict for models made under a keras_ddl.Strategy.

Patched: keras/src/trainers/trainer.py, backend/tensorflow/trainer.py (3.15.1).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from keras_ddl import communicator
from keras_ddl.communicator.reporting import shown_frames
from keras_ddl.data import order
from keras_ddl.strategy import accumulation, observing, resilience
from keras_ddl.strategy.base import BaseStrategy, strategy_of, strategy_of_ranks
from keras_ddl.strategy.calls import fits, trainer_calls
from keras_ddl.strategy.keras_patches import adopting, compiling, reading
from keras_ddl.strategy.keras_patches.callbacks import adopted
from keras_ddl.strategy.keras_patches.step_functions import IteratorFunction, PredictFunction, name_of_step
from keras_ddl.strategy.shards import gathered_slots


def fit(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs fit after ranks agree on random states. All ranks stop together, and errors become those of keras_ddl."""
    compiling.check_scope(model, strategy_of(model))
    try:
        return resilience.current().call_of_trainer(
            "fit",
            model,
            lambda: _fit(original, model, *args, **kwargs),
            lambda: _callbacks(inspect.signature(original).bind(model, *args, **kwargs).arguments.get("callbacks")),
        )
    except Exception as error:
        shown_frames.leave_out(error, continues=True)  # as Keras's own fit does, for short tracebacks in notebooks
        raise
    finally:
        reading.close_streams()


def _fit(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    strategy = strategy_of(model)
    with fits.running(model) as running:
        if strategy is None:
            compiling.warn_if_alone(model)
            return original(model, *args, **kwargs)
        adopting.adopt_optimizers(model, strategy)
        bound = _bind(original, model, args, kwargs, strategy)
        observer = observing.observer()
        if observer is not None:
            bound.arguments["callbacks"] = observer.callbacks_of_fit(bound.arguments["callbacks"])
        if not strategy.is_several:
            return original(*bound.args, **bound.kwargs)
        # Set both, because Keras's `self.stop_training = False` does nothing if reading already gives False.
        running.agreed_stop = model.__dict__["stop_training"] = False
        try:
            with order.translate_errors():
                accumulation.combine(model)  # left over from an interrupted fit
                strategy.random_state.agree()
                history = original(*bound.args, **bound.kwargs)
                _end_together(strategy)
                return history
        finally:
            model.__dict__["stop_training"], running.agreed_stop = bool(running.agreed_stop), None


def _callbacks(given: Any) -> list[Any]:
    """Returns the callbacks that the program has passed as a list, a Keras CallbackList or a single callback."""
    given = getattr(given, "callbacks", given)
    return [] if given is None else [*given] if isinstance(given, (list, tuple)) else [given]


def evaluate_or_predict(method: str, original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs evaluate or predict in the same way on all ranks; only rank 0 shows the progress bar."""
    returned = _evaluate_or_predict(method, original, model, *args, **kwargs)
    observer = observing.observer()
    if observer is not None and method == "predict":
        observer.predicted(model, returned)
    return returned


def _evaluate_or_predict(method: str, original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    if gathered_slots.spread_in(model.variables):
        adopting.adopt_model(model)  # no rank can evaluate or predict on its own
    compiling.check_scope(model, strategy_of(model))
    strategy = strategy_of_ranks(model)
    if strategy is None:
        return original(model, *args, **kwargs)
    is_outermost = not trainer_calls.running()

    def call() -> Any:
        with order.translate_errors(), trainer_calls.Loop(model, method).entered():
            bound = _bind(original, model, args, kwargs, strategy)
            returned = original(*bound.args, **bound.kwargs)
            if is_outermost:
                _end_together(strategy)
            return returned

    try:
        return resilience.current().call_of_trainer(method, model, call)
    except Exception as error:
        shown_frames.leave_out(error, continues=True)
        raise
    finally:
        reading.close_streams()


def _end_together(strategy: BaseStrategy) -> None:
    """If rank 0 may be lost, makes sure that its callbacks, or those of its successor, have written everything."""
    if strategy.job.goes_on:
        communicator.barrier(name="keras_ddl/end")


def _bind(
    original: Callable[..., Any], model: Any, args: Any, kwargs: Any, strategy: BaseStrategy
) -> inspect.BoundArguments:
    """Binds the arguments. Only rank 0 shows the progress bar, for any `verbose`."""
    bound = inspect.signature(original).bind(model, *args, **kwargs)
    if strategy.rank != 0 and not strategy.job.goes_on:  # otherwise the callbacks do it, because this may become rank 0
        bound.arguments["verbose"] = 0
    bound.arguments["callbacks"] = adopted(bound.arguments.get("callbacks"))
    return bound


def get_metrics_result_or_logs(original: Callable[..., Any], model: Any, logs: Any) -> Any:
    """Completes the logs that Keras returns at the end of an epoch or an evaluation."""
    fit, strategy = fits.of(model), strategy_of_ranks(model)
    if fit is not None:
        logs = logs or fit.logs_before or logs  # the epoch was resumed after its last batch
    if strategy is not None:
        order.warn_of_unlike_values(strategy.rank)
        if isinstance(trainer_calls.innermost(), fits.Fit):  # not in a nested evaluation
            accumulation.combine(model)
    result, observer = original(model, logs), observing.observer()
    if observer is not None:
        observer.end_epoch(model, result)
    return result


def make_function(original: Callable[..., Any], model: Any, step_function: Any) -> Any:
    """Makes train_function or test_function for several ranks: traces the step on the global batch."""
    strategy = strategy_of_ranks(model)
    if strategy is None:
        function = original(model, step_function)
    else:
        function = IteratorFunction(model, step_function, strategy, original)
    is_training = name_of_step(model, step_function) == "train_step"
    return observing.train_function(model, function) if is_training else function


def make_predict_function(original: Callable[..., Any], model: Any, force: Any = False) -> None:
    """Like `make_function`, for predict_function."""
    strategy = strategy_of_ranks(model)
    if strategy is None:
        original(model, force)
    elif model.predict_function is None or force:
        model.predict_function = PredictFunction(model, strategy, original)


# ---- stop_training


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
    """Stops training after this batch. All ranks call it, so they need not agree on it."""
    model.stop_training = True
    fit = fits.of(model)
    if fit is not None and fit.agreed_stop is not None:
        fit.agreed_stop = True


# Inside fit, reading returns the agreed value. Otherwise a rank that sets it, at any moment and in any
# thread, would stop early and leave the others waiting.
STOP_TRAINING = property(_get_stop_training, _set_stop_training)
