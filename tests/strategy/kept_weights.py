"""Callbacks that store sharded weights and set them later, compared with one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

import keras_ddl
from keras_ddl.errors import ConfigError
from keras_ddl.strategy.shards.kept_weights import KeptWeight
from strategy.common import RANK, X, Y, assert_close, raises, shared_folder

OPTIONS: dict[str, Any] = {"batch_size": 10, "shuffle": False, "verbose": 0}


class Best(keras.callbacks.Callback):
    """Keeps the weights with the highest loss so far and restores them when the loss is lower."""

    def __init__(self) -> None:
        super().__init__()
        self.loss = -np.inf

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if logs["loss"] > self.loss:
            self.loss, self.kept = logs["loss"], [each.copy() for each in self.model.get_weights()]
        elif epoch == 2:
            self.model.set_weights(self.kept)


class Average(keras.callbacks.Callback):
    """Stochastic weight averaging as users write it by hand."""

    def on_train_begin(self, logs: Any = None) -> None:
        self.average = self.model.get_weights()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        new = self.model.get_weights()
        self.average = [(old * (epoch + 1) + each) / (epoch + 2) for old, each in zip(self.average, new)]

    def on_train_end(self, logs: Any = None) -> None:
        self.model.set_weights(self.average)


class Finder(keras.callbacks.Callback):
    """Tries learning rates, then restores the weights."""

    def on_train_begin(self, logs: Any = None) -> None:
        self.weights = self.model.get_weights()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.model.optimizer.learning_rate = float(self.model.optimizer.learning_rate) * 1.5

    def on_train_end(self, logs: Any = None) -> None:
        for layer in self.model.layers:
            count = len(layer.weights)
            layer.set_weights(self.weights[:count])
            self.weights = self.weights[count:]


def stopping(**options: Any) -> keras.callbacks.EarlyStopping:
    """Restores the first epoch's weights after three epochs, because mode="max" treats a falling loss as worse."""
    chosen = {"monitor": "loss", "mode": "max", "patience": 2, "restore_best_weights": True, **options}
    return keras.callbacks.EarlyStopping(**chosen)


def fit(model: keras.Model, *callbacks: Any, epochs: int = 6) -> dict[str, Any]:
    history: dict[str, Any] = model.fit(X, Y, epochs=epochs, callbacks=list(callbacks), **OPTIONS).history
    return history


def check_equal_one_process(
    compiled: Callable[[Any], keras.Model],
    strategy: Any,
    assert_equal: Callable[[Any, Any], None],
    gathered: Callable[[], Any],
) -> None:
    """Checks each of these callbacks, and that early stopping gathers no weights.

    Args:
        compiled: makes a model under a strategy, or for one process if given None.
        gathered: a context manager that lists the variables gathered on this rank.
    """
    model, one = compiled(strategy), compiled(None)
    with gathered() as names:
        early, alone = stopping(), stopping()
        history = fit(model, early)
    assert fit(one, alone).keys() == history.keys() and len(history["loss"]) == 3, history
    assert names == [], names
    spread = [each for each in early.best_weights if isinstance(each, KeptWeight)]
    assert spread and all(sum(part.size for part in each.parts) < each.size for each in spread), early.best_weights
    assert_equal(model, one)
    raises(ConfigError, "this rank's part.*whole_model", lambda: np.asarray(spread[0]))
    fit(model, epochs=1)
    fit(one, epochs=1)
    assert_equal(model, one)

    with shared_folder() as folder:
        paths = [f"{folder}/{name}.weights.h5" for name in ("all", f"alone-{RANK}")]
        for path, trained in zip(paths, (model, one)):
            saver = keras.callbacks.ModelCheckpoint(path, monitor="loss", save_best_only=True, save_weights_only=True)
            fit(trained, Best(), Average(), saver, epochs=4)
            fit(trained, Finder(), epochs=1)
        assert_equal(model, one)
        keras_ddl.barrier()
        files = [compiled(None) for _ in range(2)]
        for path, each in zip(paths, files):
            each.load_weights(path)
        for mine, expected in zip(*(each.get_weights() for each in files), strict=True):
            np.testing.assert_allclose(mine, expected, rtol=0, atol=1e-12)

    with strategy.whole_model(model):
        arrays = model.get_weights()
    assert all(isinstance(each, np.ndarray) for each in arrays)
    kept = model.get_weights()
    model.set_weights([2 * each for each in arrays])
    model.set_weights(kept)
    with strategy.whole_model(model):
        assert_close(model.get_weights(), arrays, 0)
        model.set_weights([3 * each for each in kept])
        for mine, expected in zip(model.get_weights(), arrays, strict=True):
            np.testing.assert_array_equal(mine, 3 * expected)
    other = compiled(None)
    raises(ConfigError, "which every rank holds in full", lambda: other.set_weights(kept))
    raises(ValueError, "one value for each weight", lambda: model.set_weights(kept[1:]))
    if RANK == 0:
        model.set_weights(kept)
    raises(ConfigError, "the same values on all ranks", lambda: fit(model, epochs=1))


def check_resumed_equals_one_process(
    compiled: Callable[[Any], keras.Model], strategy: Any, assert_equal: Callable[[Any, Any], None]
) -> None:
    """Checks that a resumed run still has the first run's best weights."""
    one = compiled(None)
    fit(one, stopping())
    with shared_folder() as folder:
        for epochs in (2, 6):
            model = compiled(strategy)
            saver = keras_ddl.callbacks.Checkpoint(folder, resume=True, save_best=False, export_base=False)
            fit(model, stopping(), saver, epochs=epochs)
            keras_ddl.barrier()
    assert_close(_complete(strategy, model), one.get_weights())


def _complete(strategy: Any, model: keras.Model) -> list[np.ndarray]:
    with strategy.whole_model(model):
        weights: list[np.ndarray] = model.get_weights()
    return weights
