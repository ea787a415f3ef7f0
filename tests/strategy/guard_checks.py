"""The divergence guard stops, restores, or gives up, and ignores stable training. Run by test_strategy.py."""

import numpy as np
import pytest

from keras_ddl import callbacks
from keras_ddl.errors import ConfigError
from strategy.common import (
    SIZE,
    STRATEGY,
    X,
    check_equal_on_all_ranks,
    everyone,
    keras,
    recorded_warnings,
    set_precision,
    shared_folder,
)


def regression(learning_rate, momentum=0.0):
    """A regression that diverges at learning rates above 2 / (largest eigenvalue), about 0.7."""
    set_precision("float64")
    keras.utils.set_random_seed(5)
    with STRATEGY.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1, use_bias=False)])
        model.compile(keras.optimizers.SGD(learning_rate, momentum), "mse", metrics=["mae"])
    return model


TARGETS = X @ np.arange(1.0, 7.0)[:, None]


def fit_guarded(model, guard, *parts, **arguments):
    with recorded_warnings("DivergenceGuard") as said:
        defaults = {"batch_size": 10, "epochs": 12, "shuffle": False, "verbose": 0}
        history = model.fit(X[:40], TARGETS[:40], callbacks=[*parts, guard], **{**defaults, **arguments}).history
    messages = everyone((guard.message, said))
    assert messages == [messages[0]] * SIZE, messages
    check_equal_on_all_ranks(model, history)
    return history, said


def check_divergence_stops_all_ranks_with_a_message():
    for validation in ({}, {"validation_data": (X, TARGETS)}):
        model = regression(2.5)
        history, said = fit_guarded(model, callbacks.DivergenceGuard(window=2), **validation)
        assert len(history["loss"]) < 3 and model.optimizer.iterations < 12, history
        assert len(said) == 1 and "loss is" in said[0] and "the lowest earlier loss was" in said[0], said
        assert "Training stops. Lower the learning rate" in said[0], said
    model = regression(1e-9)
    _, said = fit_guarded(model, callbacks.DivergenceGuard(window=2, ceiling=0.5, grace=3))
    assert (
        len(said) == 1 and "window that ends with step 6; it must be below 0.5 by then. Training stops." in said[0]
    ), said
    assert int(model.optimizer.iterations) == 6


def check_divergence_restores_at_a_lower_rate_until_training_converges():
    with shared_folder() as folder:
        for directory in (None, folder / "ckpt"):
            model = regression(2.5, momentum=0.5)
            before = model.get_weights()
            guard = callbacks.DivergenceGuard(action="go_back", window=2, factor=0.2, retries=3, directory=directory)
            savers = [callbacks.Checkpoint(directory, save_freq=1, keep=20, export_base=False)] if directory else []
            if directory:  # a checkpoint must exist before training diverges
                model.optimizer.learning_rate = 0.01
                fit_guarded(model, callbacks.DivergenceGuard(window=2), *savers, epochs=2)
                before = model.get_weights()
                model.optimizer.learning_rate = 2.5
            history, said = fit_guarded(model, guard, *savers, epochs=30)
            assert 1 <= len(said) <= 3 and "Training goes back to step" in said[0], said
            assert f"to step {8 if directory else 0} and continues with learning rate 0.5 (1 of 3)" in said[0], said
            assert len(history["loss"]) == 30 and history["loss"][-1] < 1e-2 * history["loss"][0], history["loss"]
            assert abs(float(model.optimizer.learning_rate) - 2.5 * 0.2 ** len(said)) < 1e-6
            assert np.isfinite(history["loss"][2:]).all() and not np.array_equal(before[0], model.get_weights()[0])


def check_guard_ignores_stable_training_and_works_with_schedules():
    def run(*guards):
        model = regression(0.02, momentum=0.9)
        schedule = callbacks.LearningRateSchedule(keras.optimizers.schedules.CosineDecay(0.05, 48))
        losses = fit_guarded(model, guards[0], schedule, epochs=12)[0] if guards else None
        if not guards:
            losses = model.fit(
                X[:40], TARGETS[:40], batch_size=10, epochs=12, shuffle=False, verbose=0, callbacks=[schedule]
            ).history
        return losses["loss"], model.get_weights()[0]

    plain, weights = run()
    losses, guarded = run(callbacks.DivergenceGuard(action="go_back", window=3))
    assert losses == plain
    np.testing.assert_array_equal(guarded, weights)
    # The guard keeps the rate of a schedule lowered.
    model = regression(0.02)
    schedule = callbacks.LearningRateSchedule(lambda epoch: 100.0 if epoch < 5 else 1.0)
    guard = callbacks.DivergenceGuard(action="go_back", window=2, factor=0.1)
    history, said = fit_guarded(model, guard, schedule)
    assert len(said) == 1 and "learning rate 0.2 (1 of 3)" in said[0], said
    assert abs(history["learning_rate"][-1] - 0.002) < 1e-8, history["learning_rate"]


def check_guard_rejects_unknown_metrics_and_schedules():
    for bad in (
        {"action": "pray"},
        {"factor": 1.5},
        {"retries": True},
        {"ceiling": np.nan},
    ):
        with pytest.raises(ConfigError, match="Received"):
            callbacks.DivergenceGuard(**bad)
    with pytest.raises(ConfigError, match="Received: monitor='perplexity'; the logs have"):
        regression(0.1).fit(X, TARGETS, verbose=0, callbacks=[callbacks.DivergenceGuard("perplexity")])
    model = regression(keras.optimizers.schedules.CosineDecay(0.1, 10))
    with pytest.raises(ConfigError, match="SGD with a schedule"):
        model.fit(X, TARGETS, verbose=0, callbacks=[callbacks.DivergenceGuard(action="go_back")])
