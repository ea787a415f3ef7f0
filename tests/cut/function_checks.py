"""`Strategy.function` on real ranks, compared with tf.function in one process. Run by test_function.py."""

import contextlib
import gc
import io
import sys
import warnings
import weakref

import keras
import numpy as np
from cut.against_one_process import assert_same, expected
from cut.chunks import MOMENTUM, Chunks

import keras_ddl
from harness.rank_program import long
from keras_ddl import config
from keras_ddl.compat.tensorflow import tf
from keras_ddl.data import chunk
from strategy.common import RANK, SIZE, STRATEGY, raises, set_precision

RNG = np.random.default_rng(5)
X, Y = RNG.normal(size=(37, 6)), RNG.integers(0, 3, size=37)
layers = keras.layers


def batches(rows=10):
    return [(X[i : i + rows], Y[i : i + rows]) for i in range(0, len(X), rows)]


def guide_loop(wrap, data):
    """The custom loop of Keras's guides with dropout, batch statistics, clipping and a metric: all need other ranks."""
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


def check_function_equals_one_process():
    data = batches(9)[:2]  # one shape, because tracing takes longest
    assert_same(guide_loop(STRATEGY.function, data), expected(guide_loop, data))


def check_function_with_unknown_sizes_is_traced_as_in_one_process():
    shapes = [(4, 3), (4, 5), (2, 5), (4, 3), (4, 7), (6, 6), (4, 5), (1, 3)]

    def traced(wrap):
        seen = []

        def step(x, y):
            seen.append((tuple(x.shape), tuple(y.shape)))
            return tf.reduce_sum(x) + tf.reduce_sum(y)

        function = wrap(step)
        for rows, columns in shapes:
            function(np.ones([rows, columns]), np.ones([rows]))
        return seen

    one = traced(lambda step: tf.function(step, reduce_retracing=True))
    assert len(one) == 3, one
    assert traced(lambda step: STRATEGY.function(step, reduce_retracing=True)) == one


@long
def check_function_normalizes_each_ranks_rows():
    steps = []

    def loop(wrap, normalize):
        set_precision("float64")
        keras.utils.set_random_seed(6)
        model = keras.Sequential([keras.Input((6,)), layers.Dense(5), normalize(), layers.ReLU(), layers.Dense(3)])
        optimizer = keras.optimizers.Adam(1e-2, global_clipnorm=0.5)
        loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

        def train_step(x, y):
            with tf.GradientTape() as tape:
                loss = loss_fn(y, model(x, training=True))
            optimizer.apply(tape.gradient(loss, model.trainable_weights), model.trainable_weights)
            return loss

        steps.append(wrap(train_step))
        losses = [steps[-1](x, y).numpy() for x, y in data]
        return [*losses, *model.get_weights(), *(each.numpy() for each in optimizer.variables)]

    def split(rows):
        return [end - first for first, end in (chunk(rows, rank, SIZE) for rank in range(SIZE))]

    data = [*batches(), (X[:2], Y[:2])]  # the last batch has no row for some ranks
    one = loop(lambda function: tf.function(function, autograph=False), lambda: Chunks(split))
    strategy = keras_ddl.Strategy(batch_statistics="rank")
    found = loop(strategy.function, lambda: layers.BatchNormalization(momentum=MOMENTUM))
    assert_same(found, one, 1e-12)
    text = steps[-1].explain()
    assert "own rows: 1 calls" in text and "1 collectives per step" in text, text


def check_function_gives_rank_0_values_to_variables():
    variable = tf.Variable(float(RANK + 1))
    assert float(STRATEGY.function(lambda x: variable * tf.reduce_sum(x))(tf.ones([4]))) == 4.0


def check_function_refuses_different_batches():
    step = STRATEGY.function(lambda x: tf.reduce_sum(x))
    raises(
        keras_ddl.errors.RankMismatchError,
        "same global batch.*call 0.*rank 0",
        lambda: step(np.arange(8.0) + RANK),
    )
    assert float(step(np.ones(8))) == 8.0  # later calls work


def check_function_in_a_scope_and_in_other_functions():
    step = STRATEGY.function(lambda x: tf.reduce_sum(x) / x.shape[0])
    with STRATEGY.scope():
        assert float(step(tf.ones([4]))) == 1.0
    assert float(STRATEGY.function(lambda x: step(x) + 1.0)(tf.ones([4]))) == 2.0
    raises(keras_ddl.errors.ConfigError, "outside of other tf.functions", lambda: tf.function(step)(tf.ones([4])))


def check_function_as_a_method_is_bound_per_object():
    class Trainer:
        __hash__ = None  # like a dataclass

        def __init__(self, number):
            self.weight = tf.Variable(np.full(6, number))

        @STRATEGY.function
        def step(self, x, scale=1.0):
            if tf.reduce_sum(x) > 0:  # needs autograph
                self.weight.assign_add(scale * tf.reduce_sum(x, axis=0) / x.shape[0])
            return self.weight + 0.0

    class Traced(Trainer):
        __hash__ = object.__hash__  # tf.function needs it

        @STRATEGY.function
        @tf.function(input_signature=[tf.TensorSpec([None, 6], tf.float64)])
        def largest(self, x):
            return self.weight * tf.reduce_max(x)

    one, two = Trainer(1.0), Traced(2.0)
    batch = np.abs(X[:7])
    mean = batch.mean(axis=0)
    expected = [1 + mean, 2 + mean / 2, 1 + 2 * mean, (2 + mean / 2) * X.max()]
    assert_same([one.step(batch), two.step(batch, scale=0.5), one.step(x=batch), two.largest(X)], expected)
    assert one.step is one.step and one.step is not two.step and "collective" in one.step.explain()
    alive = [weakref.ref(one), weakref.ref(two)]
    del one, two
    gc.collect()
    assert [each() for each in alive] == [None, None]


def check_function_assigns_variables_passed_as_arguments():
    @STRATEGY.function
    def step(total, x, seen=None):
        total.assign_add(tf.reduce_sum(x, axis=0))
        seen["rows"].assign_add(tf.shape(x)[0])
        return total * 2.0

    totals = [tf.Variable(np.full(6, float(RANK))) for _ in range(2)]  # rank 0's values are used
    rows = tf.Variable(0)
    found = [step(total, X[:6], seen={"rows": rows}) for total in (*totals, totals[0])]
    one = X[:6].sum(axis=0)  # equals the variable's extent, which must not be taken for rows
    assert_same([*found, *totals, rows], [2 * one, 2 * one, 4 * one, 2 * one, one, 18])


def check_function_accepts_ragged_tensors_alone():
    lengths = tf.constant([3, 0, 2, 1, 4])
    whole = tf.RaggedTensor.from_row_lengths(tf.range(10.0), lengths)
    step = lambda x: (tf.reduce_sum(x, 1) / tf.cast(x.nrows(), tf.float32), tf.reduce_max(x))  # noqa: E731
    one = [each.numpy() for each in step(whole)]
    begin, end = RANK * 5 // SIZE, (RANK + 1) * 5 // SIZE
    for retracing in (False, True):
        assert_same([e.numpy() for e in STRATEGY.function(step, reduce_retracing=retracing)(whole)], one)
        found = STRATEGY.function(step, batches="rank", reduce_retracing=retracing)(whole[begin:end])
        assert_same([each.numpy() for each in found], one)


def check_function_does_not_take_components_of_ragged_tensors_for_rows():
    # The ragged tensor has as many values and splits as the batch has rows, but none of its tensors holds rows.
    ragged = tf.RaggedTensor.from_row_lengths(tf.range(4.0), [4, 0, 0])
    x = tf.reshape(tf.range(8.0), [4, 2])
    step = STRATEGY.function(lambda x, r: (tf.reduce_sum(x * 2), r.values * 1.0, r.row_splits + 0))
    assert_same([each.numpy() for each in step(x, ragged)], [np.float32(56), np.arange(4.0), [0, 4, 4, 4]])


def check_function_refuses_wrong_arguments():
    raises(keras_ddl.errors.ConfigError, "batches='mine'", lambda: STRATEGY.function(lambda x: x, batches="mine"))
    raises(keras_ddl.errors.ConfigError, "Received: int", lambda: STRATEGY.function(3))
    raises(keras_ddl.errors.ConfigError, "'global' or 'rank'", lambda: keras_ddl.Strategy(batch_statistics="local"))


def check_function_explains_its_collectives():
    with config.override("EXPLAIN_STEP", "1"), contextlib.redirect_stdout(io.StringIO()) as shown:
        step = STRATEGY.function(lambda x: tf.reduce_sum(tf.sort(tf.reduce_mean(x, axis=1))) + tf.reduce_mean(x))
        step(X)
    text = step.explain()
    assert "Sort" in text or "TopKV2 needs all rows" in text, text
    assert "function_checks.py" in text and "collectives per step" in text, text
    assert (text in shown.getvalue()) == (RANK == 0)


def check_function_warns_once_of_gathers_without_a_rule():
    large, small = np.ones([200, 1000]), np.ones([4, 3])  # 1.6 MB
    step = STRATEGY.function(lambda x: (tf.reduce_sum(tf.sort(x, axis=0)), x * 2.0))  # the second is a result
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in (large, large, small):
            step(batch)
            line = sys._getframe().f_lineno - 1
    messages = [str(each.message) for each in caught if "gathered" in str(each.message)]
    assert len(messages) == (RANK == 0), messages
    if RANK == 0:
        assert "1,600,000 bytes" in messages[0] and "TopKV2 needs all rows (" in messages[0], messages
        assert "function_checks.py" in messages[0], messages
        (where,) = [(each.filename, each.lineno) for each in caught if "gathered" in str(each.message)]
        assert where == (__file__, line), where


def check_function_refuses_steps_that_differ_between_ranks():
    step = STRATEGY.function(lambda x: tf.reduce_sum(x) * RANK if RANK else tf.reduce_sum(x))
    raises(keras_ddl.errors.RankMismatchError, "same step.*rank 1", lambda: step(tf.ones([4])))


def check_function_refuses_collectives_inside():
    step = STRATEGY.function(lambda x: keras_ddl.all_reduce(tf.reduce_sum(x)))
    raises(keras_ddl.errors.ConfigError, "DdlAllReduce", lambda: step(tf.ones([4])))


def steps_with_state():
    """Yields steps whose operations keep state, and builds new state for each run."""
    queue = tf.queue.FIFOQueue(100, [tf.float64], [[6]])
    numbers = iter(tf.data.Dataset.range(100).shuffle(100, seed=1))
    table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, -1)
    calls = []

    def count(x):
        calls.append(len(x))
        return np.float64(sum(calls))

    def queued(x):
        queue.enqueue_many(x)
        return queue.dequeue(), queue.size()

    def counted(x):
        keys = tf.range(tf.shape(x, out_type=tf.int64)[0])
        table.insert(keys, table.lookup(keys) + 1)
        return table.lookup(keys), table.size()

    yield lambda x: (tf.random.shuffle(x), tf.random.categorical(tf.zeros([2, 50]), 3))
    yield queued
    yield lambda x: (next(numbers), tf.reduce_sum(x))
    yield counted
    yield lambda x: (tf.numpy_function(count, [x], tf.float64), tf.reduce_sum(x))


def stateful_loop(wrap, data):
    found = []
    tf.random.set_seed(7)  # state of the steps may also depend on it
    for step in steps_with_state():
        tf.random.set_seed(7)
        step = wrap(step)
        found += [np.asarray(each) for x, _ in data for each in step(x)]
    return found


@long
def check_stateful_operations_equal_one_process():
    assert_same(stateful_loop(STRATEGY.function, batches()[:2]), expected(stateful_loop, batches()[:2]))
