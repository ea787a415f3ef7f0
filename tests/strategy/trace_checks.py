"""Layers, losses and optimizers are called and built as often as in one process, in the same order and with the same
shapes. Run by test_strategy.py.
"""

import contextlib
import random

import keras_ddl
from harness.rank_program import long
from keras_ddl.compat.tensorflow import tf
from strategy.common import RANK, STRATEGY, X, Y, keras, set_precision
from strategy.oracle import case, fit

layers = keras.layers
EVENTS: list[tuple] = []


def note(what, value=None):
    EVENTS.append((what, None if value is None else tuple(value.shape)))


@keras.saving.register_keras_serializable("trace_checks")
class Noted(layers.Dense):
    """Records each build and call."""

    def build(self, shape):
        EVENTS.append(("layer.build", tuple(shape)))
        super().build(shape)

    def call(self, x, training=None):
        EVENTS.append(("layer.call", tuple(x.shape), training))
        return super().call(x)


@keras.saving.register_keras_serializable("trace_checks")
class NotedSGD(keras.optimizers.SGD):
    """Records when it is built, and for which variables."""

    def build(self, variables):
        EVENTS.append(("optimizer.build", [tuple(each.shape) for each in variables]))
        super().build(variables)


@keras.saving.register_keras_serializable("trace_checks")
def noted_loss(y, predicted):
    note("loss", predicted)
    return keras.ops.mean(keras.ops.square(y - predicted), axis=-1)


class OwnStep(keras.Model):
    """Uses two optimizers, one of them for the last layer only."""

    def __init__(self):
        super().__init__()
        self.first, self.last = Noted(5, activation="tanh"), layers.Dense(2)
        self.second = NotedSGD(0.02, momentum=0.5)

    def call(self, x, training=None):
        EVENTS.append(("model.call", tuple(x.shape), training))
        return self.last(self.first(x))

    def train_step(self, batch):
        x, y = batch
        note("train_step", x)
        with tf.GradientTape(persistent=True) as tape:
            loss = keras.ops.mean(noted_loss(y, self(x, training=True)))
        for optimizer, layer in ((self.optimizer, self.first), (self.second, self.last)):
            weights = layer.trainable_variables
            optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def without_input(scope, **options):
    with scope:
        model = keras.Sequential([Noted(5, activation="tanh"), layers.Dropout(0.3), Noted(2)])
        model.compile(NotedSGD(0.05, momentum=0.9), noted_loss, metrics=["mae"], **options)
    return model


def same_events(program):
    """Turns a program into a check that every rank records the same events as one process."""

    def check():
        set_precision("float64")
        expected = None
        if RANK == 0:
            expected = _notes(program, contextlib.nullcontext())
        expected = keras_ddl.broadcast_object(expected, name="test/expected")
        noted = _notes(program, STRATEGY.scope())
        for rank, theirs in enumerate(keras_ddl.all_gather_object(noted, name="test/noted")):
            for place, (one, other) in enumerate(zip([*expected, "end"], [*theirs, "end"])):
                assert one == other, f"rank {rank}, {place}: {other}, in one process {one}\n{theirs}\n{expected}"
            assert len(expected) == len(theirs), f"rank {rank}: {theirs}, in one process {expected}"

    return check


def _notes(program, scope):
    keras.utils.set_random_seed(7)
    EVENTS.clear()
    program(scope)
    return list(EVENTS)


@same_events
def check_calls_of_the_first_step(scope):
    """Trains on arrays in order before anything else has numbered rows; the last batch is shorter."""
    assert int(STRATEGY.keras_steps.rows_trained) == 0, "the first check of a launch must be this one"
    model = without_input(scope)
    model.fit(X[:10], Y[:10], batch_size=4, shuffle=False, verbose=0)
    EVENTS.append("evaluate")
    model.evaluate(X[:10], Y[:10], batch_size=4, verbose=0)


@long
@same_events
def check_calls_of_a_model_without_an_input(scope):
    model = without_input(scope)
    model.fit(X[:9], Y[:9], batch_size=4, epochs=2, verbose=0)
    EVENTS.append("second fit")
    model.fit(X[:8], Y[:8], batch_size=4, verbose=0)
    EVENTS.append("evaluate")
    model.evaluate(X[:9], Y[:9], batch_size=4, verbose=0)
    EVENTS.append("predict")
    model.predict(X[:9], batch_size=4, verbose=0)
    model.predict(X[:8], batch_size=4, verbose=0)


@long
@same_events
def check_calls_of_a_custom_step(scope):
    with scope:
        model = OwnStep()
        model.compile(NotedSGD(0.05))
    model.fit(X[:9], Y[:9], batch_size=4, epochs=2, verbose=0)
    model.predict(X[:6], batch_size=4, verbose=0)
    model.fit(X[:9], Y[:9], batch_size=4, verbose=0)


@long
@same_events
def check_calls_in_eager_mode(scope):
    model = without_input(scope, run_eagerly=True)
    model.fit(X[:9], Y[:9], batch_size=4, epochs=2, verbose=0)
    model.evaluate(X[:9], Y[:9], batch_size=4, verbose=0)


class Drawing(layers.Layer):
    """Draws from Python's generator whenever it is traced, as augmentations do."""

    def call(self, x):
        return x * random.random() + random.choice([-1.0, 1.0])


@long
@case()
def check_python_random_numbers_drawn_while_tracing(scope):
    with scope:
        model = keras.Sequential([Drawing(), layers.Dense(4, activation="tanh"), Drawing(), layers.Dense(2)])
        model.compile(keras.optimizers.SGD(0.05), "mse")
    return fit(model, validation_split=0.2)
