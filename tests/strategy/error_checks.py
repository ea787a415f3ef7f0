"""The Strategy raises on every rank where ranks would otherwise hang, and works afterwards. Run by
test_strategy.py.
"""

import time

import numpy as np

import keras_ddl
from harness.rank_program import long
from keras_ddl import ops
from keras_ddl.compat.tensorflow import tf
from keras_ddl.errors import ConfigError, RankMismatchError
from strategy.common import RANK, SIZE, STRATEGY, X, Y, dense_model, keras, raises, recorded_warnings, set_precision

set_precision("float32")
SGD = keras.optimizers.SGD


def assert_raises_on_all_ranks(error, message, function):
    """Checks that `function` raises `error` on all ranks (not a DeadlineError), and that collectives still work."""
    raises(error, message, function)
    assert keras_ddl.all_gather_object(RANK) == list(range(SIZE))


def compiled(**arguments):
    with STRATEGY.scope():
        model = dense_model()
        model.compile(**{"optimizer": "sgd", "loss": "mse", **arguments})
    return model


def check_models_of_different_shapes():
    def build():
        with STRATEGY.scope():
            keras.layers.Dense(3 + RANK, name="wide").build((None, 4))

    assert_raises_on_all_ranks(RankMismatchError, r"wide.*4x3.*4x4|wide.*4x4.*4x3", build)


@long
def check_models_with_more_layers_on_one_rank():
    def build_and_fit():
        with STRATEGY.scope():
            layers = [keras.layers.Dense(2, name=f"layer_{word}") for word in ("one", "two")[: 1 + RANK]]
            model = keras.Sequential([keras.Input((6,)), *layers])
            model.compile(SGD(0.1, name="of_the_shorter"), "mse")
        model.fit(X, Y, verbose=0)

    assert_raises_on_all_ranks(RankMismatchError, "layer_two/kernel", build_and_fit)


@long
def check_model_made_outside_the_scope():
    model = dense_model()

    def compile_inside():
        with STRATEGY.scope():
            model.compile("sgd", "mse")

    assert_raises_on_all_ranks(ConfigError, "A model.*must be made inside.*'dense_model'", compile_inside)
    with STRATEGY.scope():
        optimizer = SGD(0.1)
    assert_raises_on_all_ranks(ConfigError, "A model.*must be made inside", lambda: model.compile(optimizer, "mse"))
    model.compile("sgd", "mse")

    def fit_inside():
        with STRATEGY.scope():
            model.fit(X, Y, verbose=0)

    assert_raises_on_all_ranks(ConfigError, "A model.*must be made inside", fit_inside)
    with recorded_warnings("each rank trains it alone") as messages:
        model.fit(X, Y, verbose=0)
    assert messages


def check_jit_compile():
    assert_raises_on_all_ranks(ConfigError, "jit_compile=True cannot be used", lambda: compiled(jit_compile=True))
    assert compiled(jit_compile="auto").jit_compile is False
    assert compiled().jit_compile is False


def check_nested_scopes():
    other = keras_ddl.Strategy(batch_statistics="rank")
    stock = tf.distribute.OneDeviceStrategy("/cpu:0")

    def enter(outer, inner):
        with outer.scope(), inner.scope():
            pass

    assert_raises_on_all_ranks(
        ConfigError, "inside the scope of another strategy.*Strategy is active", lambda: enter(STRATEGY, other)
    )
    assert_raises_on_all_ranks(ConfigError, "OneDeviceStrategy is active", lambda: enter(stock, STRATEGY))

    def make():
        with stock.scope():
            keras_ddl.Strategy()

    assert_raises_on_all_ranks(ConfigError, "OneDeviceStrategy is active", make)
    with STRATEGY.scope(), STRATEGY.scope():
        pass


def check_arguments():
    assert_raises_on_all_ranks(
        ConfigError, "reader must be 'all' or 'rank0'", lambda: keras_ddl.Strategy(reader="rank1")
    )
    assert_raises_on_all_ranks(
        ConfigError, 'is now sharding="optimizer"', lambda: keras_ddl.Strategy(shard_optimizer=True)
    )
    assert_raises_on_all_ranks(
        ConfigError, "mode is now an argument of keras_ddl.init", lambda: keras_ddl.Strategy("p")
    )


def check_data_that_is_already_split():
    model = compiled()
    mine = slice(0, 40 - 20 * RANK)
    whole = r"must have all the data.*\(40, 6\).*\(20, 6\)"
    assert_raises_on_all_ranks(RankMismatchError, whole, lambda: model.fit(X[mine], Y[mine], batch_size=10, verbose=0))
    half = slice(20 * RANK, 20 * RANK + 20)
    assert_raises_on_all_ranks(
        RankMismatchError, "must have all the data", lambda: model.fit(X[half], Y[half], verbose=0)
    )


def check_different_numbers_of_steps():
    model = compiled()
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(10).take(2 + RANK)
    assert_raises_on_all_ranks(
        RankMismatchError, "same number of steps.*all the data", lambda: model.fit(dataset, verbose=0)
    )


@long
def check_gradients_applied_outside_run_warn():
    with STRATEGY.scope():
        variable = keras.Variable(np.ones(3, "float32"))
        optimizer = SGD(0.1)
    for expected in (1, 0):  # once per optimizer
        with recorded_warnings("gradients of this rank only") as messages:
            optimizer.apply([tf.ones(3)], [variable])
        assert len(messages) == expected


def check_unequal_shuffles():
    unequal = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(9, seed=RANK).batch(8)
    assert_raises_on_all_ranks(
        RankMismatchError, "same seed on all ranks", lambda: STRATEGY.experimental_distribute_dataset(unequal)
    )


def check_different_activations_are_a_mismatch():
    with STRATEGY.scope():
        own = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2, activation="tanh" if RANK == 0 else "relu")])
        own.compile("sgd", "mse")
    assert_raises_on_all_ranks(
        RankMismatchError,
        r"all ranks must trace the same step. Received: Tanh.* on rank 0, and Relu.* on rank 1",
        lambda: own.fit(X, Y, verbose=0),
    )


@long
def check_generator_that_ends_early_on_one_rank_is_a_mismatch():
    def rows():
        for _ in range(2 if RANK == 1 else 100):
            yield X[:8], Y[:8]

    assert_raises_on_all_ranks(
        RankMismatchError,
        "the ranks run different collectives.* have as many batches",
        lambda: compiled().fit(rows(), steps_per_epoch=5, epochs=1, verbose=0),
    )


@long
def check_evaluating_in_a_callback_on_rank_0_only_is_a_mismatch():
    class Evaluates(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.evaluate(X, Y, verbose=0)

    assert_raises_on_all_ranks(
        RankMismatchError,
        "the ranks run different collectives",
        lambda: compiled().fit(X, Y, verbose=0, callbacks=[Evaluates()] if RANK == 0 else []),
    )


@long
def check_collectives_wait_for_slow_host_functions():
    """Two collectives run at once, and each is delayed by a different rank."""

    def sleep(x):
        time.sleep(12)
        return x

    @tf.function(autograph=False)
    def both(x):
        slow = tf.ensure_shape(tf.numpy_function(sleep, [x], tf.float32), [4])
        first, second = (slow, x) if RANK == 0 else (x, slow)
        return ops.all_reduce(first, name="crossed/first"), ops.all_reduce(second, name="crossed/second")

    sums = both(tf.ones([4]))
    assert all(bool(tf.reduce_all(each == SIZE)) for each in sums), sums
