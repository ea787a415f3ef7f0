"""Ranks that wait for one another in different collectives fail in seconds, and those that are only slow do not.

Run by test_strategy.py.
"""

import time

import numpy as np

import keras_ddl
from harness.rank_program import long
from keras_ddl import ops
from keras_ddl.compat.tensorflow import tf
from strategy.common import RANK, SIZE, STRATEGY, keras, set_precision
from strategy.error_checks import refuses

set_precision("float32")
MANY = np.ones((8 * SIZE, 6), np.float32), np.ones((8 * SIZE, 2), np.float32)


def model(activation="tanh"):
    with STRATEGY.scope():
        made = keras.Sequential(
            [keras.Input((6,)), keras.layers.Dense(8, activation=activation), keras.layers.Dense(2)]
        )
        made.compile("adam", "mse")
    return made


def check_another_activation_of_the_same_shapes_is_a_mismatch():
    own = model("tanh" if RANK == 0 else "relu")
    refuses(
        keras_ddl.errors.RankMismatchError,
        r"all ranks must trace the same step. Received: Tanh.* on rank 0, and Relu.* on rank 1",
        lambda: own.fit(*MANY, batch_size=4 * SIZE, verbose=0),
    )


def check_generator_that_ends_early_on_one_rank_is_a_mismatch():
    def rows():
        for _ in range(2 if RANK == 1 else 100):
            yield MANY

    refuses(
        keras_ddl.errors.RankMismatchError,
        "the ranks run different collectives.* have as many batches",
        lambda: model().fit(rows(), steps_per_epoch=5, epochs=1, verbose=0),
    )


@long
def check_a_callback_of_rank_0_alone_that_evaluates_is_a_mismatch():
    class Evaluates(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.evaluate(*MANY, verbose=0)

    refuses(
        keras_ddl.errors.RankMismatchError,
        "the ranks run different collectives",
        lambda: model().fit(*MANY, verbose=0, callbacks=[Evaluates()] if RANK == 0 else []),
    )


def crossed(slow):
    """Runs two collectives at once, of which `slow` holds back another one on each rank."""

    @tf.function(autograph=False)
    def both(x):
        first, second = (slow(x), x) if RANK == 0 else (x, slow(x))
        return ops.all_reduce(first, name="crossed/first"), ops.all_reduce(second, name="crossed/second")

    sums = both(tf.ones([4]))
    assert all(bool(tf.reduce_all(each == SIZE)) for each in sums), sums


@long
def check_ranks_whose_host_functions_sleep_are_waited_for():
    def sleep(x):
        time.sleep(12)
        return x

    crossed(lambda x: tf.ensure_shape(tf.numpy_function(sleep, [x], tf.float32), [4]))


@long
def check_ranks_that_compute_are_waited_for():
    def compute(x):
        end = tf.timestamp() + 12

        def body(m):
            return tf.linalg.matmul(m, m) * 0.001

        busy = tf.while_loop(lambda m: tf.timestamp() < end, lambda m: (body(m),), (tf.fill([200, 200], 0.1),))[0]
        return x + 0 * tf.cast(tf.math.count_nonzero(tf.math.is_nan(busy)), tf.float32)

    crossed(compute)
