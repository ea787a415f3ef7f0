"""Patches of Keras's CallbackList: writers write on rank 0, all ranks stop together and start from the same state.

Patched: keras/src/callbacks/callback_list.py (3.15.1).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keras_ddl import _keras_compat, communicator
from keras_ddl import strategy_agreement as agreement
from keras_ddl._keras_compat import keras
from keras_ddl._keras_compat.optimizer import accumulators

# Callbacks that do nothing but write; ranks other than 0 leave them out. They decide nothing that others need: what
# BackupAndRestore restores on rank 0 is sent to all.
_WRITERS = ("BackupAndRestore", "CSVLogger", "OrbaxCheckpoint", "RemoteMonitor", "TensorBoard")
_NOT_STOPPING = (keras.callbacks.History, keras.callbacks.ProgbarLogger, keras.callbacks.ModelCheckpoint) + tuple(
    getattr(keras.callbacks, name) for name in _WRITERS if hasattr(keras.callbacks, name)
)
_BATCH_HOOKS = {
    "train": ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end"),
    "test": ("on_test_batch_begin", "on_test_batch_end"),
    "predict": ("on_predict_batch_begin", "on_predict_batch_end"),
}


class _Silent(keras.callbacks.Callback):
    """Stands in for a writer on ranks other than 0."""


class _ModelThatDoesNotSave:
    """A model for ModelCheckpoint on ranks other than 0: it keeps track of the best value, but nothing is written."""

    def __init__(self, model: keras.Model) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def save(self, *args: Any, **kwargs: Any) -> None:
        pass

    save_weights = save


def set_model(original: Callable[..., Any]) -> Callable[..., Any]:
    """On ranks other than 0, replaces callbacks that write."""

    def wrapper(self, model):
        strategy = _keras_compat.strategy_of(model)
        if strategy is not None and strategy.rank != 0:
            self.callbacks = [_on_other_ranks(callback) for callback in self.callbacks]
        original(self, model)
        if strategy is not None and strategy.rank != 0:
            for callback in self.callbacks:
                if isinstance(callback, keras.callbacks.ModelCheckpoint):
                    callback.set_model(_ModelThatDoesNotSave(model))

    return wrapper


def _on_other_ranks(callback: keras.callbacks.Callback) -> keras.callbacks.Callback:
    writers = tuple(getattr(keras.callbacks, name) for name in _WRITERS if hasattr(keras.callbacks, name))
    if isinstance(callback, writers):
        return _Silent()
    if isinstance(callback, keras.callbacks.ModelCheckpoint):
        callback.verbose = 0
    return callback


def on_train_begin(original: Callable[..., Any]) -> Callable[..., Any]:
    """After all callbacks: one model, one epoch to begin with, and rank 0's values everywhere.

    Last, so that what a callback has restored on rank 0 is included.
    """

    def wrapper(self, logs=None):
        original(self, logs)
        strategy = _shared_strategy(self)
        if strategy is None:
            return
        model, rank = self.model, strategy.rank
        agreement.check_same_model(model, rank)
        _agree_on_steps(self, strategy)
        start = communicator.broadcast_object(model._initial_epoch, name=f"keras_ddl/{model.name}/initial_epoch")
        model._initial_epoch = start
        partial = accumulators(model.optimizer)
        skip = {id(variable) for variable in partial}
        agreement.broadcast_variables([v for v in agreement.all_variables(model) if id(v) not in skip], rank)
        agreement.keep_accumulated_gradients_of_rank_0(partial, rank)
        self._ddl_train_stop = agreement.any_rank(_may_stop(self, "train"), f"keras_ddl/{model.name}/batch_hooks")
        _agree_to_stop(self)

    return wrapper


def _agree_on_steps(callbacks: Any, strategy: Any) -> None:
    mine = (callbacks.params.get("steps"), callbacks.params.get("epochs"))
    everyone = communicator.all_gather_object(mine, name=f"keras_ddl/{callbacks.model.name}/steps")
    for other, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            raise agreement.RankMismatchError(
                "All ranks must train for the same number of steps and epochs. "
                f"Received: {everyone[0][0]} steps x {everyone[0][1]} epochs on rank 0, {theirs[0]} x {theirs[1]} on "
                f"rank {other} (rank {strategy.rank}). Give every rank the whole data, not its part of it: keras_ddl "
                "takes each rank's rows out of every batch."
            )


def on_epoch_begin(original: Callable[..., Any]) -> Callable[..., Any]:
    """After all callbacks: Python's generator, which will shuffle a PyDataset, is the same on all ranks."""

    def wrapper(self, epoch, logs=None):
        original(self, epoch, logs)
        strategy = _shared_strategy(self)
        if strategy is None:
            return
        mine = (bool(self.model.__dict__.get("stop_training")), agreement.python_random_digest())
        everyone = communicator.all_gather_object(mine, name=f"keras_ddl/{self.model.name}/epoch_begin")
        strategy.random_state.agree_python([digest for _, digest in everyone])
        self.model.__dict__["_ddl_agreed_stop"] = any(stop for stop, _ in everyone)

    return wrapper


def on_epoch_end(original: Callable[..., Any]) -> Callable[..., Any]:
    """After all callbacks: stop on all ranks if any wants to."""

    def wrapper(self, epoch, logs=None):
        original(self, epoch, logs)
        if _shared_strategy(self) is not None:
            _agree_to_stop(self)

    return wrapper


def on_train_batch_end(original: Callable[..., Any]) -> Callable[..., Any]:
    """The same within an epoch, if there is a callback that could ask for it."""

    def wrapper(self, batch, logs=None):
        original(self, batch, logs)
        if getattr(self, "_ddl_train_stop", False) and _shared_strategy(self) is not None:
            _agree_to_stop(self)

    return wrapper


def _agree_to_stop(callbacks: Any) -> None:
    model = callbacks.model
    wants = bool(model.__dict__.get("stop_training"))
    model.__dict__["_ddl_agreed_stop"] = agreement.any_rank(wants, f"keras_ddl/{model.name}/stop_training")


def _begin(kind: str) -> Callable[..., Any]:
    def patch(original):
        def wrapper(self, logs=None):
            original(self, logs)
            if _shared_strategy(self) is not None:
                stops = agreement.any_rank(_may_stop(self, kind), f"keras_ddl/{self.model.name}/{kind}_batch_hooks")
                setattr(self, f"_ddl_{kind}_stop", stops)

        return wrapper

    patch.__name__ = f"on_{kind}_begin"
    return patch


def _batch_end(kind: str, attribute: str) -> Callable[..., Any]:
    def patch(original):
        def wrapper(self, batch, logs=None):
            original(self, batch, logs)
            if getattr(self, f"_ddl_{kind}_stop", False) and _shared_strategy(self) is not None:
                wants = bool(getattr(self.model, attribute, False))
                setattr(
                    self.model,
                    attribute,
                    agreement.any_rank(wants, f"keras_ddl/{self.model.name}/{attribute}"),
                )

        return wrapper

    patch.__name__ = f"on_{kind}_batch_end"
    return patch


on_test_begin = _begin("test")
on_test_batch_end = _batch_end("test", "stop_evaluating")
on_predict_begin = _begin("predict")
on_predict_batch_end = _batch_end("predict", "stop_predicting")


def _shared_strategy(callbacks: Any) -> Any:
    """The Strategy of the callbacks' model if it has more than one rank, else None."""
    strategy = _keras_compat.strategy_of(getattr(callbacks, "model", None))
    return strategy if strategy is not None and strategy.size > 1 else None


def _may_stop(callbacks: Any, kind: str) -> bool:
    """Whether a callback has code of its own that runs within an epoch and might ask to stop."""
    base = keras.callbacks.Callback
    for callback in callbacks.callbacks:
        if type(callback) in _NOT_STOPPING or getattr(callback, "never_stops_within_epoch", False):
            continue
        for hook in _BATCH_HOOKS[kind]:
            if hook in vars(callback) or getattr(type(callback), hook, None) is not getattr(base, hook):
                return True
    return False
