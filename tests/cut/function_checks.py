"""`Strategy.function` on real ranks, against the same loop with tf.function in one process. Run by test_function.py."""

import contextlib
import io

import keras
import numpy as np
from cut.chunks import MOMENTUM, Chunks

import keras_ddl
from keras_ddl import config
from keras_ddl.compat.tensorflow import tf
from keras_ddl.strategy.data import chunk
from strategy.common import RANK, SIZE, STRATEGY, raises, set_precision

RNG = np.random.default_rng(5)
X, Y = RNG.normal(size=(37, 6)), RNG.integers(0, 3, size=37)
layers = keras.layers


def batches(rows=10):
    return [(X[i : i + rows], Y[i : i + rows]) for i in range(0, len(X), rows)]


def guide_loop(wrap, data):
    """The custom loop of Keras's guides, with what makes ranks differ: dropout, statistics, clipping, a metric."""
    set_precision("float64")
    keras.utils.set_random_seed(3)
    inputs = keras.Input((6,))
    hidden = layers.BatchNormalization()(layers.Dense(8, activation="tanh")(inputs))
    model = keras.Model(inputs, layers.Dense(3)(layers.Dropout(0.3)(hidden)))
    optimizer = keras.optimizers.Adam(1e-2, global_clipnorm=0.5)
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    accuracy = keras.metrics.SparseCategoricalAccuracy()

    @wrap
    def train_step(x, y):
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            loss = loss_fn(y, logits) + 0.1 * tf.reduce_sum(tf.square(logits)) / tf.cast(tf.shape(x)[0], logits.dtype)
        gradients = tape.gradient(loss, model.trainable_weights)
        optimizer.apply(gradients, model.trainable_weights)
        accuracy.update_state(y, logits)
        return {"loss": loss, "nothing": None, "logits": logits}

    steps = [train_step(x, y) for x, y in data]
    weights = [*model.get_weights(), *(v.numpy() for v in optimizer.variables)]
    return [*weights, *(s["loss"].numpy() for s in steps), steps[-1]["logits"].numpy(), accuracy.result().numpy()]


def expected(loop, data):
    """What one process computes: rank 0, with tf.function."""
    found = loop(tf.function, data) if RANK == 0 else None
    return keras_ddl.broadcast_object(found, name="test/expected")


def assert_same(found, one, tolerance=1e-13):
    assert len(found) == len(one)
    for mine, theirs in zip(found, one):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=tolerance)
    bits = keras_ddl.all_gather_object([np.asarray(each).tobytes() for each in found], name="test/bits")
    assert all(each == bits[0] for each in bits), "ranks differ in some bit"


def check_function_equals_one_process():
    assert_same(guide_loop(STRATEGY.function, batches()), expected(guide_loop, batches()))


def check_function_takes_rows_of_each_rank():
    ends = [0, 7, 7, *[10] * SIZE][: SIZE + 1] if SIZE > 2 else [0, 7, 10]
    data = batches()
    mine = [tuple(each[min(ends[RANK], len(each)) : min(ends[RANK + 1], len(each))] for each in pair) for pair in data]
    found = guide_loop(lambda step: STRATEGY.function(step, batches="rank"), mine)
    assert_same(found, expected(guide_loop, data))
    found = guide_loop(STRATEGY.function(batches="rank", reduce_retracing=True).__call__, mine)
    assert_same(found, expected(guide_loop, data))


def check_function_with_open_sizes_is_traced_twice():
    sizes = (10, 4, 1, 9, 2, 11)
    ends = np.cumsum([0, *sizes])
    data = [(X[a:b], Y[a:b]) for a, b in zip(ends, ends[1:])]
    functions = []

    def wrap(step):
        functions.append(STRATEGY.function(step, reduce_retracing=True))
        return functions[0]

    found = guide_loop(wrap, data)
    assert len(functions[0].reports) == 2, len(functions[0].reports)
    assert_same(found, expected(lambda _, d: guide_loop(tf.function(reduce_retracing=True), d), data))


def check_function_of_two_optimizers_and_rows_one_after_the_other():
    def loop(wrap, data):
        set_precision("float64")
        keras.utils.set_random_seed(4)
        generator = keras.Sequential([keras.Input((4,)), layers.Dense(6)])
        critic = keras.Sequential([keras.Input((6,)), layers.Dense(8, activation="relu"), layers.Dense(1)])
        loss_fn = keras.losses.BinaryCrossentropy(from_logits=True)
        seeds = keras.random.SeedGenerator(1)
        first, second = keras.optimizers.Adam(1e-2), keras.optimizers.RMSprop(1e-2)

        @wrap
        def train_step(real):
            rows = tf.shape(real)[0]
            noise = keras.random.normal((rows, 4), seed=seeds, dtype="float64")
            both = tf.concat([generator(noise), real], axis=0)
            labels = tf.concat([tf.ones((rows, 1)), tf.zeros((rows, 1))], axis=0)
            with tf.GradientTape() as tape:
                loss = loss_fn(labels, critic(both))
            first.apply(tape.gradient(loss, critic.trainable_weights), critic.trainable_weights)
            with tf.GradientTape() as tape:
                deceived = loss_fn(tf.zeros((rows, 1)), critic(generator(noise)))
            second.apply(tape.gradient(deceived, generator.trainable_weights), generator.trainable_weights)
            return loss, deceived

        losses = [each.numpy() for x, _ in data for each in train_step(x)]
        return [*generator.get_weights(), *critic.get_weights(), *losses]

    assert_same(loop(STRATEGY.function, batches()), expected(loop, batches()))


def check_function_normalizes_by_each_rank_s_rows():
    def loop(wrap, data, normalize):
        set_precision("float64")
        keras.utils.set_random_seed(6)
        model = keras.Sequential([keras.Input((6,)), layers.Dense(5), normalize(), layers.ReLU(), layers.Dense(3)])
        optimizer = keras.optimizers.Adam(1e-2, global_clipnorm=0.5)
        loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

        @wrap
        def train_step(x, y):
            with tf.GradientTape() as tape:
                loss = loss_fn(y, model(x, training=True))
            optimizer.apply(tape.gradient(loss, model.trainable_weights), model.trainable_weights)
            return loss

        losses = [train_step(x, y).numpy() for x, y in data]
        return [*losses, *model.get_weights(), *(each.numpy() for each in optimizer.variables)]

    def split(rows):
        ends = [chunk(rows, rank, SIZE) for rank in range(SIZE)]
        return [end - first for first, end in ends]

    strategy = keras_ddl.Strategy(batch_statistics="rank")
    data = [*batches(), (X[:2], Y[:2])]  # and a batch of which not every rank has a row
    step = []

    def wrap(function):
        step.append(strategy.function(function))
        return step[0]

    found = loop(wrap, data, lambda: layers.BatchNormalization(momentum=MOMENTUM))
    one = loop(lambda function: tf.function(function, autograph=False), data, lambda: Chunks(split))
    assert_same(found, one, 1e-12)
    text = step[0].explain()
    assert "own rows: 1 calls" in text and "1 collectives a step" in text, text


def check_function_refuses_other_batch_statistics():
    raises(keras_ddl.errors.ConfigError, "'global' or 'rank'", lambda: keras_ddl.Strategy(batch_statistics="local"))


def check_function_gives_rank_0_values_to_variables():
    variable = tf.Variable(float(RANK + 1))
    assert float(STRATEGY.function(lambda x: variable * tf.reduce_sum(x))(tf.ones([4]))) == 4.0


def check_function_refuses_other_batches_on_a_rank():
    step = STRATEGY.function(lambda x: tf.reduce_sum(x))
    raises(
        keras_ddl.errors.RankMismatchError,
        "same whole batch.*call 0.*rank 0",
        lambda: step(np.arange(8.0) + RANK),
    )
    assert float(step(np.ones(8))) == 8.0  # and goes on


def check_function_refuses_a_scope_and_wrong_arguments():
    def inside():
        with STRATEGY.scope():
            STRATEGY.function(lambda x: x)(tf.ones([4]))

    raises(keras_ddl.errors.ConfigError, "without a scope", inside)
    raises(keras_ddl.errors.ConfigError, "batches='mine'", lambda: STRATEGY.function(lambda x: x, batches="mine"))
    raises(keras_ddl.errors.ConfigError, "Received: int", lambda: STRATEGY.function(3))


def check_function_explains_its_collectives():
    with config.override("EXPLAIN_STEP", "1"), contextlib.redirect_stdout(io.StringIO()) as shown:
        step = STRATEGY.function(lambda x: tf.reduce_sum(tf.sort(tf.reduce_mean(x, axis=1))) + tf.reduce_mean(x))
        step(X)
    text = step.explain()
    assert "Sort" in text or "TopKV2 needs all rows" in text, text
    assert "function_checks.py" in text and "collectives a step" in text, text
    assert (text in shown.getvalue()) == (RANK == 0)


def check_function_refuses_steps_that_differ_between_ranks():
    step = STRATEGY.function(lambda x: tf.reduce_sum(x) * RANK if RANK else tf.reduce_sum(x))
    raises(keras_ddl.errors.RankMismatchError, "same step.*rank 1", lambda: step(tf.ones([4])))


def check_function_refuses_collectives_inside():
    step = STRATEGY.function(lambda x: keras_ddl.all_reduce(tf.reduce_sum(x)))
    raises(keras_ddl.errors.ConfigError, "DdlAllReduce", lambda: step(tf.ones([4])))
