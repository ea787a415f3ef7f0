"""A step fails on one rank: all ranks raise the same error at the same call, write nothing, and can continue.

Every program runs in one process without a strategy, and then on the ranks. The checks compare which calls raise, the
error classes, and all variables at the end. Run by test_strategy.py.
"""

import re

import numpy as np

import keras_ddl
from harness.rank_program import long
from keras_ddl.compat import keras as keras_compat
from keras_ddl.compat.tensorflow import tf
from keras_ddl.errors import KerasDdlError
from strategy.common import RANK, SIZE, STRATEGY, assert_close, keras, of_one_process, set_precision

WORDS = 12  # rows of the vocabulary: a larger index fails on the rank that looks it up
ROWS = 6 * SIZE
RNG = np.random.default_rng(5)
X = RNG.integers(0, WORDS, (ROWS, 3))
Y = RNG.normal(size=(ROWS, 2))


def rows_of(array, rank=RANK):
    return array[rank * len(array) // SIZE : (rank + 1) * len(array) // SIZE]


def bad(*ranks):
    """Returns the batch with an out-of-vocabulary index in the first row of the given ranks."""
    x = X.copy()
    for rank in ranks:
        x[rank * ROWS // SIZE, 0] = WORDS + 5
    return x


class TwoDraws(keras.layers.Layer):
    """Draws twice from one generator: the second draw reads the state that the first one wrote."""

    def __init__(self):
        super().__init__()
        self.seeds = keras.random.SeedGenerator(3)

    def call(self, x, training=False):
        if not training:
            return x
        return keras.random.dropout(keras.random.dropout(x, 0.3, seed=self.seeds), 0.2, seed=self.seeds)


def model(**compiled):
    set_precision("float64")
    keras.utils.set_random_seed(11)
    layers = keras.layers
    made = keras.Sequential(
        [
            keras.Input((3,), dtype="int64"),
            layers.Embedding(WORDS, 4),
            layers.Flatten(),
            layers.Dense(8, activation="relu"),
            TwoDraws(),
            layers.BatchNormalization(),
            layers.Dense(2),
        ]
    )
    made.compile("adam", "mse", metrics=["mae"], **compiled)
    return made


def values(made, metrics=True):
    """metrics=False leaves out metrics, which train_on_batch resets before the step."""
    found = [*made.variables, *made.optimizer.variables, *(made.metrics_variables if metrics else ())]
    return [np.array(each) for each in found]


def assert_equal(mine, theirs):
    assert len(mine) == len(theirs)
    for one, other in zip(mine, theirs):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)


def outcome(call):
    """Returns "ok" and the call's result, or the error's class and text. A DeadlineError fails the comparison."""
    try:
        return "ok", np.asarray(call(), np.float64)
    except (KerasDdlError, tf.errors.OpError, ValueError, RuntimeError, KeyError) as error:
        return type(error).__name__, str(error)


def compare(train, batches, before_failure=None):
    """Runs `train(model, batch)` on all batches on the ranks, and on the good batches only in one process.

    One process may have written part of a failing batch, depending on the order of operations.

    before_failure: what `train` does with a bad batch before it fails, to repeat it in one process. None: nothing.
    Returns: the outcomes of this rank's calls.
    """

    def in_one_process():
        alone = model()
        expected = []
        for batch in batches:
            if not is_bad(batch):
                expected.append(outcome(lambda batch=batch: train(alone, batch, slice(None))))
                continue
            expected.append(("InvalidArgumentError", None))
            if before_failure is not None:
                before_failure(alone, batch)
        return expected, values(alone)

    expected, left = of_one_process(in_one_process)
    with STRATEGY.scope():
        made = model()
    mine = slice(RANK * ROWS // SIZE, (RANK + 1) * ROWS // SIZE)
    found = []
    for batch in batches:
        before = values(made, metrics=False)
        found.append(outcome(lambda batch=batch: train(made, batch, mine)))
        after = values(made, metrics=False)
        if is_bad(batch) and before_failure is None and len(before) == len(after):  # otherwise this call made variables
            assert_close(before, after, 0)
    assert [kind for kind, _ in found] == [kind for kind, _ in expected], (found, expected)
    for (kind, one), (_, other) in zip(found, expected):
        if kind == "ok":
            np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)
    everyone = keras_ddl.all_gather_object([kind for kind, _ in found], name="outcomes")
    assert everyone == [[kind for kind, _ in found]] * SIZE
    assert_equal(values(made), left)
    assert_close(values(made), keras_ddl.broadcast_object(values(made), name="values"), 0)
    return found


def is_bad(batch):
    rows = batch[1] if isinstance(batch, tuple) else batch
    return rows.max() >= WORDS


def train_on_batch(made, batch, mine):
    return made.train_on_batch(batch[mine], Y[mine])


@long
def check_train_on_batch_raises_on_all_ranks():
    last = SIZE - 1
    found = compare(train_on_batch, [bad(last), bad(last), X, bad(0), bad(0, last), X, X])
    for call, rank in ((1, last), (3, 0), (4, 0)):
        text = found[call][1]
        assert re.search(rf"{WORDS + 5} is not in \[0, {WORDS}\)", text), text
        assert rank == RANK or text.startswith(f"rank {rank}: "), text


@long
def check_fit_and_evaluate_and_predict():
    def fit(made, batch, mine):
        x = np.concatenate([X, batch, X])
        return made.fit(x, np.concatenate([Y] * 3), batch_size=ROWS, shuffle=False, verbose=0).history["loss"]

    def evaluate(made, batch, mine):
        return made.evaluate(np.concatenate([batch, X]), np.concatenate([Y, Y]), batch_size=ROWS, verbose=0)

    def predict(made, batch, mine):
        return made.predict(np.concatenate([batch, X]), batch_size=ROWS, verbose=0)

    def everything(made, batch, mine):
        which, rows = batch
        return {"fit": fit, "evaluate": evaluate, "predict": predict}[which](made, rows, mine)

    def before_failure(alone, batch):
        if batch[0] == "fit":
            alone.fit(X, Y, batch_size=ROWS, shuffle=False, verbose=0)
        elif batch[0] == "evaluate":
            alone.reset_metrics()

    calls = [(which, rows) for which in ("fit", "evaluate", "predict") for rows in (X, bad(SIZE - 1), X)]
    compare(everything, calls, before_failure=before_failure)


@long
def check_several_steps_in_one_call():
    def fit(made, *batches):
        y = np.concatenate([Y] * len(batches))
        return made.fit(np.concatenate(batches), y, batch_size=ROWS, shuffle=False, verbose=0)

    with STRATEGY.scope():
        made = model(steps_per_execution=2)
    alone = model()
    fit(made, X, X, X, X)
    kind, text = outcome(lambda: fit(made, X, X, X, bad(SIZE - 1)) and 0.0)
    assert kind == "InvalidArgumentError", text
    fit(made, X, X)
    for batches in (4, 3, 2):
        fit(alone, *[X] * batches)
    assert_equal([np.array(each) for each in made.weights], [np.array(each) for each in alone.weights])


@long
def check_custom_step():
    def own(made, batch, mine):
        def step(x, y):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((made(x, training=True) - y) ** 2)
            made.optimizer.apply(tape.gradient(loss, made.trainable_variables), made.trainable_variables)
            return loss

        if not hasattr(made, "own_step"):
            made.own_step = tf.function(step) if mine == slice(None) else STRATEGY.function(step)
        return made.own_step(batch, Y)

    compare(own, [X, bad(SIZE - 1), X, bad(0, SIZE - 1), X])


@long
def check_failed_eager_steps_undo_writes_outside_the_model():
    teacher, words = tf.Variable(tf.zeros([2])), tf.Variable("begun")

    class Taught(keras.Model):
        """Assigns to variables that it reaches only through a closure. The first step makes its weights."""

        fails = True

        def __init__(self):
            super().__init__()
            self.last = keras.layers.Dense(2)

        def call(self, x):
            return self.last(x)

        def train_step(self, batch):
            teacher.assign_add(keras.random.uniform((2,), dtype="float32"))
            words.assign(words + "!")
            logs = super().train_step(batch)
            if Taught.fails and RANK == SIZE - 1:
                raise KeyError("not on this rank")
            return logs

    set_precision("float32")
    keras_compat.make_global_seed_generator()
    draws = keras_compat.global_seed_generator().state
    with STRATEGY.scope():
        made = Taught()
        made.compile("adam", "mse", run_eagerly=True)
    x = keras_ddl.broadcast_object(RNG.normal(size=(ROWS, 3)), name="x")
    before = None
    for number in range(4):
        # The first step makes variables, which are undone as well; the third makes none.
        Taught.fails = number % 2 == 0
        kind, _ = outcome(lambda: made.train_on_batch(rows_of(x), rows_of(Y)))
        assert (kind == "KeyError") is Taught.fails, kind
        found = [np.asarray(each) for each in (teacher, words, draws, *made.variables, *made.optimizer.variables)]
        everyone = keras_ddl.all_gather_object([each.tolist() for each in found], name="found")
        assert all(each == everyone[0] for each in everyone), (number, everyone)
        if Taught.fails:
            assert before is None or everyone[0] == before, (number, everyone[0], before)
            assert words.numpy() == b"begun" + b"!" * (number // 2), words
        before = everyone[0]


def check_exception_while_one_rank_traces():
    """The other ranks have already exchanged variables and must forget their traces."""

    class Picky(keras.layers.Layer):
        fails = True

        def call(self, x):
            if Picky.fails and RANK == SIZE - 1:
                raise KeyError("not on this rank")
            return x

    x = keras_ddl.broadcast_object(RNG.normal(size=(ROWS, 3)), name="x")

    def train(made):
        return made.train_on_batch(rows_of(x), rows_of(Y))

    for is_trained in (True, False):
        Picky.fails = False
        with STRATEGY.scope():
            made = keras.Sequential([keras.Input((3,)), Picky(), keras.layers.Dense(2)])
            made.compile("sgd", "mse")
        if is_trained:
            made.fit(x[:SIZE], Y[:SIZE], batch_size=SIZE, verbose=0)
        Picky.fails = True
        for _ in range(2):
            kind, text = outcome(lambda made=made: train(made))
            assert kind == "KeyError" and "not on this rank" in text, (kind, text)
        Picky.fails = False
        kind, text = outcome(lambda made=made: train(made))
        assert kind == "ok", text
        assert len(set(keras_ddl.all_gather_object(str(text), name="losses"))) == 1


@long
def check_exception_in_one_ranks_data():
    def generator(fails):
        for i in range(5):
            if fails and i == 2 and RANK == SIZE - 1:
                raise ValueError("the data of one rank")
            yield X, Y

    def without_it():
        alone = model()
        for steps in (2, 5):
            alone.fit(((X, Y) for _ in range(steps)), steps_per_epoch=steps, verbose=0)
        return [np.array(each) for each in alone.weights]

    expected = of_one_process(without_it)
    with STRATEGY.scope():
        made = model()
    kind, text = outcome(lambda: made.fit(generator(True), steps_per_epoch=5, verbose=0) and 0.0)
    assert kind == "InvalidArgumentError" and "the data of one rank" in text, (kind, text)
    made.fit(generator(False), steps_per_epoch=5, verbose=0)
    assert_equal([np.array(each) for each in made.weights], expected)


@long
def check_failure_while_another_rank_waits_for_input():
    """A rank fails during a sum that it started, while another rank needs more input from it first."""
    rows = tf.Variable(tf.zeros([4], tf.float64))

    def step(x, y):
        with tf.control_dependencies([tf.debugging.assert_less(tf.reduce_max(x), np.int64(WORDS), "too large")]):
            table = tf.gather(tf.ones([WORDS, 4], tf.float64), tf.minimum(x, WORDS - 1))
        ordered = tf.sort(table[:, 0, 0] * y[:, 0])
        rows.assign_add(tf.reduce_sum(table, [0, 1]))
        return tf.reduce_sum(ordered[:3]) + tf.reduce_sum(y)

    on_ranks = STRATEGY.function(step)
    for batch in (X, bad(0), X, bad(SIZE - 1), X):
        kind, text = outcome(lambda batch=batch: on_ranks(batch, Y))
        assert kind == ("ok" if batch is X else "InvalidArgumentError"), (kind, text)
    np.testing.assert_allclose(rows.numpy(), 3 * X.size * np.ones(4))
