"""Horovod's callbacks, SyncBatchNormalization and load_model. Run by test_horovod_training.py after train_checks.py."""

import keras
import numpy as np
import tensorflow as tf

import keras_ddl
from harness.rank_program import long
from keras_ddl.horovod import keras as hvd
from keras_ddl.horovod.optimizer import DistributedOptimizer
from keras_ddl.horovod.sync_batch_normalization import SyncBatchNormalization

keras_ddl.init()
RANK, SIZE = keras_ddl.rank(), keras_ddl.size()
keras.backend.set_floatx("float64")
keras.config.set_dtype_policy("float64")
RNG = np.random.default_rng(3)
X, Y = RNG.normal(size=(SIZE, 24, 6)), RNG.normal(size=(SIZE, 24, 2))


def small_model(seed=7):
    keras.utils.set_random_seed(seed)
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(4), keras.layers.Dense(2)])


def gathered(value):
    return keras_ddl.all_gather_object(value)


class Rates(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.rates, self.first = [], None

    def on_train_batch_begin(self, batch, logs=None):
        self.rates.append(float(self.model.optimizer.learning_rate))
        if self.first is None:
            self.first = [
                w.copy() for w in [*self.model.get_weights(), *map(np.asarray, self.model.optimizer.variables)]
            ]


def check_variables_are_broadcast_before_the_first_batch():
    model = small_model(seed=RANK)
    optimizer = DistributedOptimizer(keras.optimizers.SGD(0.1 * (RANK + 1), momentum=0.9))
    model.compile(optimizer, "mse")
    optimizer.build(model.trainable_variables)
    optimizer.momentums[0].assign(optimizer.momentums[0] + RANK)
    watch, mine = Rates(), model.get_weights()
    root = SIZE - 1
    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(root)
    model.fit(X[RANK], Y[RANK], batch_size=8, verbose=0, callbacks=[broadcast, watch])
    for received, sent in zip(watch.first, gathered(mine)[root]):
        np.testing.assert_array_equal(received, sent)
    momentum = watch.first[len(mine) + 2]
    assert watch.rates[0] == 0.1 * (root + 1) and (momentum == root).all(), (watch.rates, momentum)
    weights = gathered([w.tobytes() for w in model.get_weights()])
    assert all(each == weights[0] for each in weights)


def check_local_variables_are_not_broadcast():
    model = small_model()
    last = model.layers[-1]
    last.kernel.assign(last.kernel + RANK)
    optimizer = keras.optimizers.Adam(0.01)
    model.compile(optimizer, "mse", jit_compile=False)
    optimizer.build(model.trainable_variables)
    for variable in optimizer.variables[2:]:
        variable.assign(variable + RANK)
    before = last.kernel.numpy()
    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=last.bias)
    broadcast.register_local_var(last.kernel)
    watch = Rates()
    model.fit(X[RANK], Y[RANK], batch_size=24, verbose=0, callbacks=[broadcast, watch])
    np.testing.assert_array_equal(watch.first[2], before)
    slots = {v.name: value for v, value in zip(optimizer.variables, watch.first[4:])}
    named = {
        name: float(np.ravel(value)[0]) for name, value in slots.items() if "momentum" in name or "velocity" in name
    }
    own = last.path.replace("/", "_") + "_"
    assert len(named) == 8 and all(value == (RANK if name.startswith(own) else 0) for name, value in named.items()), (
        named
    )


def check_steps_that_do_not_count_rows_have_equal_weights():
    class Own(keras.Model):
        def train_step(self, data):
            return {"number": tf.constant(1.0 + RANK)}

    inputs = keras.Input((6,))
    model = Own(inputs, keras.layers.Dense(2)(inputs))
    model.compile("sgd")
    average = hvd.callbacks.MetricAverageCallback()
    history = model.fit(X[RANK][: 8 + RANK], Y[RANK][: 8 + RANK], verbose=0, callbacks=[average]).history
    np.testing.assert_allclose(history["number"], [(SIZE + 1) / 2])


# ---- SyncBatchNormalization ------------------------------------------------------------------------------------------


def normalised(layer):
    keras.utils.set_random_seed(9)
    inputs = keras.Input((5, 6))
    x = keras.layers.Dense(4, use_bias=False)(inputs)  # without bias, whose gradient would be noise
    outputs = keras.layers.Dense(2)(keras.layers.Flatten()(layer(x)))
    return keras.Model(inputs, outputs)


@long
def check_synchronised_statistics_and_gradients_equal_one_process():
    rng = np.random.default_rng(5)
    x = rng.normal(size=(3, SIZE, 4, 5, 6)) * (1 + np.arange(SIZE)).reshape(1, -1, 1, 1, 1) + 30
    y = rng.normal(size=(3, SIZE, 4, 2))
    arguments = {"batch_size": 4, "shuffle": False, "verbose": 0, "epochs": 2}
    shared = normalised(SyncBatchNormalization(momentum=0.7))
    shared.compile(DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse")
    shared.fit(x[:, RANK].reshape(-1, 5, 6), y[:, RANK].reshape(-1, 2), **arguments)
    alone = normalised(keras.layers.BatchNormalization(momentum=0.7))
    alone.compile(keras.optimizers.Adam(0.01), "mse", jit_compile=False)
    alone.fit(x.reshape(-1, 5, 6), y.reshape(-1, 2), **{**arguments, "batch_size": 4 * SIZE})
    for one, other in zip(shared.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-11, atol=1e-11)
    weights = gathered([w.tobytes() for w in shared.get_weights()])
    assert all(each == weights[0] for each in weights)


def check_synchronised_statistics_with_masks_axes_and_uneven_rows():
    rng = np.random.default_rng(6)
    rows = [2 + 3 * rank for rank in range(SIZE)]
    ends = np.cumsum([0, *rows])
    x = rng.normal(size=(ends[-1], 5, 3)) + 2
    mask = rng.uniform(size=(ends[-1], 5)) > 0.3
    own = slice(ends[RANK], ends[RANK + 1])
    for masked, axis in ((True, -1), (False, -1), (False, 1)):
        ours, plain = SyncBatchNormalization(axis=axis), keras.layers.BatchNormalization(axis=axis)
        masks = (mask[own], mask) if masked else (None, None)
        mine = ours(x[own], training=True, mask=masks[0])
        whole = plain(x, training=True, mask=masks[1])
        np.testing.assert_allclose(mine, whole[own], rtol=1e-10, atol=1e-12)
        for one, other in zip(ours.get_weights(), plain.get_weights()):
            np.testing.assert_allclose(one, other, rtol=1e-10)
    again = keras.layers.deserialize(keras.layers.serialize(ours))
    assert type(again) is SyncBatchNormalization and again.axis == 1
