"""Random numbers and host functions equal those of one process. Run by test_strategy.py; see oracle.py."""

import numpy as np

from harness.rank_program import long
from keras_ddl.compat import keras as keras_compat
from keras_ddl.compat.tensorflow import tf
from strategy.common import RANK, SIZE, STRATEGY, X, Y, everyone, keras, set_precision, shared_folder
from strategy.oracle import case, fit

layers, ops, random = keras.layers, keras.ops, keras.random


@long
@case()
def check_dropout_and_noise_layers(scope):
    with scope:
        elementwise = [layers.Dropout(0.3), layers.GaussianNoise(0.1), layers.GaussianDropout(0.2, seed=3)]
        row_dropout = [layers.SpatialDropout1D(0.3), layers.Dropout(0.3, noise_shape=(None, 1, None))]
        shared_noise = layers.Dropout(0.3, noise_shape=(1, 7, 3))
        first = [layers.Dense(7, activation="tanh"), *elementwise, layers.AlphaDropout(0.2)]
        last = [layers.Reshape((7, 1)), layers.Dense(3), *row_dropout, shared_noise, layers.Flatten(), layers.Dense(2)]
        model = keras.Sequential([keras.Input((6,)), *first, *last])
        model.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mae"])
    return fit(model)  # some ranks get no rows of the last batch


@case()
def check_random_numbers_of_tensorflow_in_a_layer(scope):
    class Noisy(layers.Layer):
        def call(self, x, training=False):
            if not training:
                return x
            noise = tf.random.normal(tf.shape(x), stddev=0.1, dtype="float64")
            other = tf.random.uniform((2, tf.shape(x)[0], 1), dtype="float64")
            return x * (1 + noise) + 0.1 * other[0] * other[1] + 0.01 * tf.random.normal((), dtype="float64")

    with scope:
        model = keras.Sequential([keras.Input((6,)), layers.Dense(5, activation="tanh"), Noisy(), layers.Dense(2)])
        model.compile(keras.optimizers.SGD(0.05), "mse")
    return fit(model)


DRAWS = {
    "normal": lambda rows, seed: random.normal((rows, 5), 1.0, 2.0, seed=seed),
    "normal in float16": lambda rows, seed: random.normal((rows, 3, 3), dtype="float16", seed=seed),
    "uniform": lambda rows, seed: random.uniform((rows, 4, 8), -1, 1, seed=seed),
    "uniform in bfloat16": lambda rows, seed: random.uniform((rows, 3), dtype="bfloat16", seed=seed),
    "randint in int64": lambda rows, seed: random.randint((rows, 3), 0, 2**40, dtype="int64", seed=seed),
    "dropout in float16": lambda rows, seed: random.dropout(tf.ones([rows, 5], tf.float16), 0.4, seed=seed),
    "folded": lambda rows, seed: random.normal((rows * 3, 5), seed=seed),
    "truncated_normal": lambda rows, seed: random.truncated_normal((rows, 5), seed=seed),
    "gamma by row": lambda rows, seed: random.gamma((rows, 2), by_row(rows, 2), seed=seed),
    "beta": lambda rows, seed: random.beta((rows, 2), 2.0, by_row(rows, 2), seed=seed),
    "binomial": lambda rows, seed: random.binomial((rows, 2), 9.0, by_row(rows, 2) / 20, seed=seed),
    "categorical": lambda rows, seed: random.categorical(by_row(rows, 3), 4, seed=seed),
}
COUNT = 2 * SIZE + 1  # rows of all ranks


def by_row(rows, columns):
    """Returns parameters that differ between rows."""
    return 1.0 + tf.cast(tf.range(rows), tf.float32)[:, tf.newaxis] * tf.ones([columns])


@long
def check_draws_of_every_kind_equal_one_process():
    set_precision("float32")
    rows = tf.zeros([COUNT, 1])
    for name, draw in DRAWS.items():

        def step(rows, seed, draw=draw):
            return draw(tf.shape(rows)[0], seed)

        seeds = [keras.random.SeedGenerator(3) for _ in range(2)]
        one = tf.function(lambda rows, step=step, seeds=seeds: step(rows, seeds[0]))
        all_ranks = STRATEGY.function(lambda rows, step=step, seeds=seeds: step(rows, seeds[1]))
        for _ in range(2):
            assert all_ranks(rows).numpy().tobytes() == one(rows).numpy().tobytes(), name


@long
def check_seeds_changed_on_rank_0_apply_to_all_ranks():
    with STRATEGY.scope():
        model = keras.Sequential([keras.Input((6,)), layers.Dropout(0.5), layers.Dense(2)])
        model.compile("sgd", "mse")
    seeds = next(v for v in model.variables if "seed" in v.name)
    if RANK == 0:
        seeds.assign([4711, 5])
        random.normal((3,))  # rank 0 advances the global generator
    model.fit(X, Y, batch_size=10, verbose=0)
    states = everyone((seeds.numpy().tolist(), keras_compat.global_seed_generator().state.numpy().tolist()))
    assert states[0][0] == [4711, 10] and all(state == states[0] for state in states), states


def check_host_functions_run_once_on_the_whole_batch():
    set_precision("float64")
    seen = []

    class Told(keras.Sequential):
        def train_step(self, data):
            logs = super().train_step(data)
            tf.print("rows", tf.shape(data[0])[0], output_stream=f"file://{folder}/printed")
            total = tf.py_function(lambda x: seen.append(len(x)) or tf.reduce_sum(x), [data[0]], tf.float64)
            return {**logs, "total": total}

    with shared_folder() as folder:
        with STRATEGY.scope():
            model = Told([keras.Input((6,)), layers.Dense(2)])
            model.compile("sgd", "mse")
        history = model.fit(X[:21], Y[:21], batch_size=10, epochs=2, shuffle=False, verbose=0).history
        printed = (folder / "printed").read_text().splitlines() if RANK == 0 else []
    np.testing.assert_allclose(history["total"], [X[20].sum()] * 2)  # the last batch's total, on all ranks
    assert seen == ([10, 10, 1] * 2 if RANK == 0 else []), seen
    assert printed == (["rows 10", "rows 10", "rows 1"] * 2 if RANK == 0 else []), printed
