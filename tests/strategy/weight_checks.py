"""Strategy(shard_weights=True) on real ranks, against one process. Run by test_shards.py."""

import contextlib

import keras
import numpy as np

import keras_ddl
from keras_ddl.strategy.shards.sharded_weights import ShardedWeight
from strategy.common import X, Y, dense_model, everyone, set_precision

STRATEGY = keras_ddl.Strategy(shard_weights=True, drift_check_percent=100)
optimizers = keras.optimizers


def compiled(strategy, make=dense_model, optimizer=lambda: optimizers.Adam(1e-2), loss="mse", **more):
    set_precision("float64")
    keras.utils.set_random_seed(11)
    with strategy.scope() if strategy is not None else contextlib.nullcontext():
        model = make()
        model.compile(optimizer(), loss, jit_compile=False, **more)
    return model


def fitted(strategy, *args, epochs=2, callbacks=(), **options):
    model = compiled(strategy, *args, **options)
    model.fit(X, Y, batch_size=10, epochs=epochs, shuffle=False, verbose=0, callbacks=list(callbacks))
    return model


def state(model):
    return [each.numpy() for each in [*model.variables, *model.optimizer.variables]]


def assert_equal(model, one, tolerance=1e-12):
    with STRATEGY.whole_model(model):
        mine = state(model)
    for value, expected in zip(mine, state(one), strict=True):
        np.testing.assert_allclose(value, expected, rtol=0, atol=tolerance)


def check_fit_evaluate_and_predict_equal_one_process():
    model, one = fitted(STRATEGY), fitted(None)
    assert_equal(model, one)
    kernels = [each for each in model.trainable_variables if len(each.shape) == 2]
    assert all(isinstance(each.value, ShardedWeight) for each in kernels)
    held = everyone([int(np.prod(each.value.chunk.shape)) for each in kernels])
    assert [sum(counts) for counts in zip(*held)] == [np.prod(each.shape) for each in kernels]
    for call in (lambda m: m.evaluate(X, Y, verbose=0), lambda m: m.predict(X, verbose=0)):
        np.testing.assert_allclose(call(model), call(one), rtol=0, atol=1e-12)
    table = STRATEGY.explain(model)
    assert "of a weight's shards for MatMul" in table and "reduce_scatter" in table, table
