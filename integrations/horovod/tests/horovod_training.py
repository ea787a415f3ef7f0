"""Data, models and the oracle for checks of training with Horovod's interface.

The oracle is one process: a plain model, trained on all ranks' batches joined.
"""

import re

import keras
import numpy as np

import keras_ddl
import keras_ddl.horovod as hvd
from keras_ddl.horovod.optimizer import DistributedOptimizer

hvd.init()
RANK, SIZE = keras_ddl.rank(), keras_ddl.size()
keras.backend.set_floatx("float64")
keras.config.set_dtype_policy("float64")

BATCH, STEPS = 4, 6
RNG = np.random.default_rng(0)
X = RNG.normal(size=(STEPS, SIZE, BATCH, 6))
Y = RNG.normal(size=(STEPS, SIZE, BATCH, 2))


def mine(data):
    return data[:, RANK].reshape(-1, *data.shape[3:])


def everyones(data):
    return data.reshape(-1, *data.shape[3:])


def dense_model():
    keras.utils.set_random_seed(4)
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(2)])


def fit(model, optimizer, x, y, batch, **arguments):
    model.compile(optimizer, "mse", **arguments)
    model.fit(x, y, batch_size=batch, epochs=2, shuffle=False, verbose=0)


def assert_close(shared, alone, tolerance=1e-13):
    for one, other in zip(shared.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance)
    variables = [*shared.weights, *(shared.optimizer.variables if hasattr(shared, "optimizer") else [])]
    state = [v.numpy().tobytes() for v in variables if "gradient_accumulator" not in v.name]
    everyone = keras_ddl.all_gather_object(state)
    assert all(other == state for other in everyone), "ranks differ"


def compare(make, build=dense_model, x=X, tolerance=1e-13, oracle=None, distribute=DistributedOptimizer, **arguments):
    """Trains on all ranks with the optimizer of `make`, and alone with the one of `oracle` or `make`; compares."""
    compiled = arguments.pop("compiled", {})
    shared = build()
    fit(shared, distribute(make(), **arguments), mine(x), mine(Y), BATCH, **compiled)
    alone = build()
    fit(alone, (oracle or make)(), everyones(x), everyones(Y), BATCH * SIZE, **compiled)
    assert_close(shared, alone, tolerance)
    start = build().get_weights()
    assert any(np.abs(a - b).max() > 1e-3 for a, b in zip(start, alone.get_weights())), "nothing was learnt"
    return shared


def raises(kind, text, call):
    try:
        call()
    except kind as error:
        assert re.search(text, str(error)), error
    else:
        raise AssertionError(f"no {kind.__name__}")
