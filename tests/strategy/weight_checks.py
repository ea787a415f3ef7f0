"""Strategy(sharding="weights") on real ranks, against one process. Run by test_strategy.py."""

import contextlib
import os
from unittest import mock

import keras
import numpy as np
import pytest

import keras_ddl
from harness.rank_program import long
from keras_ddl.compat.tensorflow import tf
from keras_ddl.errors import ConfigError, DriftError
from keras_ddl.strategy.shards.sharded_weights import ShardedWeight
from strategy import kept_weights
from strategy.common import (
    RANK,
    SIZE,
    X,
    Y,
    assert_close,
    compiled,
    dense_model,
    everyone,
    fitted,
    gathers,
    of_one_process,
    shared_folder,
    state,
)

with mock.patch.dict(os.environ, KERAS_DDL_DRIFT_CHECK_PERCENT="100"):
    STRATEGY = keras_ddl.Strategy(sharding="weights")
optimizers = keras.optimizers


def assert_equal(model, one, tolerance=1e-12):
    """Compares `model` with `one`, which only rank 0 has."""
    with STRATEGY.whole_model(model):
        mine = state(model)
    for value, expected in zip(mine, of_one_process(lambda: state(one)), strict=True):
        np.testing.assert_allclose(value, expected, rtol=0, atol=tolerance)


def assert_equal_weights(model, one):
    with STRATEGY.whole_model(model):
        mine = model.get_weights()
    assert_close(mine, one.get_weights())


def check_fit_evaluate_and_predict_equal_one_process():
    model, one = fitted(STRATEGY), fitted(None) if RANK == 0 else None
    assert_equal(model, one)
    kernels = [each for each in model.trainable_variables if len(each.shape) == 2]
    assert all(isinstance(each.value, ShardedWeight) for each in kernels)
    held = everyone([int(np.prod(each.value.chunk.shape)) for each in kernels])
    assert [sum(counts) for counts in zip(*held)] == [np.prod(each.shape) for each in kernels]
    for call in (lambda m: m.evaluate(X, Y, verbose=0), lambda m: m.predict(X, verbose=0)):
        np.testing.assert_allclose(call(model), of_one_process(lambda: call(one)), rtol=0, atol=1e-12)  # noqa: B023
    table = STRATEGY.explain(model)
    assert "of a weight's shards for MatMul" in table and "reduce_scatter" in table, table


@long
def check_sharded_weights_changed_on_some_ranks_are_a_drift_error():
    model = fitted(STRATEGY, epochs=1)
    before = model.evaluate(X, Y, verbose=0)
    kernel = model.trainable_variables[0]
    with STRATEGY.whole_model(model):
        value = kernel.numpy()
    if RANK == 0:
        kernel.assign(value + 1)
    for name, call in {
        "evaluate": lambda: model.evaluate(X, Y, verbose=0),
        "predict": lambda: model.predict(X),
    }.items():
        with pytest.raises(DriftError, match=f"when {name} begins: assignments to them on some ranks only"):
            call()
    received = "Received: assignments to .*kernel.* on rank 1"
    with pytest.raises(DriftError, match=received), STRATEGY.whole_model(model):
        pass  # would mix rank 0's new chunk with the others' old ones
    if RANK != 0:
        kernel.assign(value + 1)
    np.testing.assert_array_less(before, model.evaluate(X, Y, verbose=0))


@long
def check_mixed_precision_gathers_halves():
    def make():
        keras.config.set_dtype_policy("mixed_float16")
        return dense_model()

    def trained(strategy):
        keras.backend.set_floatx("float32")
        keras.utils.set_random_seed(11)
        with strategy.scope() if strategy is not None else contextlib.nullcontext():
            model = make()
            model.compile(optimizers.SGD(1e-2), "mse", jit_compile=False)
        model.fit(X, Y, batch_size=10, epochs=1, shuffle=False, verbose=0)
        return model

    model, one = trained(STRATEGY), trained(None)
    with STRATEGY.whole_model(model):
        for mine, expected in zip(model.get_weights(), one.get_weights(), strict=True):
            np.testing.assert_allclose(mine, expected, rtol=0, atol=1e-3)
    gathers = [line for line in STRATEGY.explain(model).splitlines() if "weight's shards" in line]
    sizes = {2 * entries for entries in (6 * 8, 8, 8 * 2, 2)}  # bytes in float16
    assert gathers and all(int(line.split()[1].replace(",", "")) in sizes for line in gathers), gathers


@long
def check_training_resumes_with_or_without_sharded_weights():
    whole = keras_ddl.Strategy(sharding=None)
    with shared_folder() as path:
        for epochs, strategy in ((1, STRATEGY), (2, whole), (3, STRATEGY)):
            save = keras_ddl.callbacks.Checkpoint(path, resume=True, save_freq=2, save_best=False)
            model = fitted(strategy, epochs=epochs, callbacks=[save])
        assert_equal(model, fitted(None, epochs=3))


@long
def check_training_resumes_if_layer_names_differ_between_ranks():
    if RANK == 0:  # as if rank 0 alone had made another model
        keras.layers.Dense(1)
    with shared_folder() as path:
        for epochs in (1, 2):
            save = keras_ddl.callbacks.Checkpoint(path, resume=True, save_best=False, export_base=False)
            model = fitted(STRATEGY, epochs=epochs, callbacks=[save])
        paths = keras_ddl.all_gather_object(model.weights[0].path)
        assert paths[0] != paths[1] == paths[-1], paths
        assert_equal(model, fitted(None, epochs=2))


@long
def check_a_model_is_saved_complete_and_loaded():
    model, one = fitted(STRATEGY, epochs=1), fitted(None, epochs=1)
    with shared_folder() as folder:
        path = f"{folder}/model.keras"
        with STRATEGY.whole_model(model):
            model.save(path)
            values = model.get_weights()
        keras_ddl.barrier()
        loaded = keras.models.load_model(path)
        assert_close(loaded.get_weights(), one.get_weights())
        for load in (lambda each: each.load_weights(path), lambda each: each.set_weights(values)):
            again = compiled(STRATEGY)
            load(again)
            np.testing.assert_allclose(
                again.evaluate(X, Y, verbose=0), one.evaluate(X, Y, verbose=0), rtol=0, atol=1e-12
            )


@long
def check_callbacks_store_and_set_sharded_weights():
    kept_weights.check_equal_one_process(compiled, STRATEGY, assert_equal, gathers)


@long
def check_a_resumed_run_has_the_best_weights_of_the_first():
    kept_weights.check_resumed_equals_one_process(compiled, STRATEGY, assert_equal)


@long
def check_sharded_weights_are_refused_outside_steps():
    model = compiled(STRATEGY)
    kernel = model.trainable_variables[0]
    refused = [
        lambda: kernel.numpy(),
        lambda: model(X[:2]),
        lambda: tf.function(lambda: kernel.value * 2.0, autograph=False)(),
        lambda: STRATEGY.run(lambda: kernel.value * 2.0),
        lambda: kernel.assign_add(kernel),
        lambda: model.predict_on_batch(X[:2]),
    ]
    for call in refused:
        with pytest.raises((ConfigError, ValueError, tf.errors.InvalidArgumentError), match="in shards"):
            call()
    eager = compiled(STRATEGY, run_eagerly=True)
    with pytest.raises(ConfigError, match="run_eagerly=True"):
        eager.fit(X, Y, verbose=0)
    assert "ShardedWeight" in repr(kernel.value)
    if RANK == SIZE - 1:
        kernel.assign(np.ones(kernel.shape))
    with pytest.raises(ConfigError, match="the same values on all ranks"):
        model.fit(X, Y, batch_size=10, verbose=0)


def check_conflicting_settings_are_refused():
    layout = keras.distribution.LayoutMap(keras_ddl.device_mesh((SIZE, 1)))
    for options, words in (
        ({"sharding": "yes"}, "sharding must be 'optimizer', 'weights' or None"),
        ({"sharding": "weights", "compression": "float16"}, "and sharding='weights'"),
        ({"sharding": "weights", "layout": layout}, "with a LayoutMap, sharding must be None or 'optimizer'"),
    ):
        with pytest.raises(ConfigError, match=words):
            keras_ddl.Strategy(**options)
    with pytest.raises(ConfigError, match="Received: Muon"):
        fitted(STRATEGY, optimizer=lambda: optimizers.Muon(1e-2), epochs=1)
