"""The program's own Python runs as often, in the same order and for the same shapes as in one process: calls of layers
and losses, and builds of optimizers. Run by test_strategy.py.
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
    """Notes each call."""

    def build(self, shape):
        EVENTS.append(("layer.build", tuple(shape)))
        super().build(shape)

    def call(self, x, training=None):
        EVENTS.append(("layer.call", tuple(x.shape), training))
        return super().call(x)


@keras.saving.register_keras_serializable("trace_checks")
class NotedSGD(keras.optimizers.SGD):
    """Notes when it is built, and for what."""

    def build(self, variables):
        EVENTS.append(("optimizer.build", [tuple(each.shape) for each in variables]))
        super().build(variables)


@keras.saving.register_keras_serializable("trace_checks")
def noted_loss(y, predicted):
    note("loss", predicted)
    return keras.ops.mean(keras.ops.square(y - predicted), axis=-1)


@keras.saving.register_keras_serializable("trace_checks")
class Subclassed(keras.Model):
    def __init__(self, **options):
        super().__init__(**options)
        self.first, self.last = Noted(5, activation="tanh"), layers.Dense(2)

    def call(self, x, training=None):
        EVENTS.append(("model.call", tuple(x.shape), training))
        return self.last(self.first(x))


class OwnStep(Subclassed):
    """Two optimizers, one of them for a layer only."""

    def __init__(self):
        super().__init__()
        self.second = NotedSGD(0.02, momentum=0.5)

    def train_step(self, batch):
        x, y = batch
        note("train_step", x)
        with tf.GradientTape(persistent=True) as tape:
            loss = keras.ops.mean(noted_loss(y, self(x, training=True)))
        for optimizer, layer in ((self.optimizer, self.first), (self.second, self.last)):
            weights = layer.trainable_variables
            optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def without_input():
    return keras.Sequential([Noted(5, activation="tanh"), layers.Dropout(0.3), Noted(2)])


def compiled(model, optimizer=None, **options):
    model.compile(optimizer or NotedSGD(0.05, momentum=0.9), noted_loss, **{"metrics": ["mae"], **options})
    return model


def rows(count, batch, drop_remainder=False):
    return tf.data.Dataset.from_tensor_slices((X[:count], Y[:count])).batch(batch, drop_remainder)


def fits_and_evaluations(scope, build, optimizer=lambda: None, **options):
    with scope:
        model = compiled(build(), optimizer(), **options)
    model.fit(X[:9], Y[:9], batch_size=4, epochs=2, verbose=0)
    EVENTS.append("second fit")
    model.fit(X[:8], Y[:8], batch_size=4, verbose=0)
    EVENTS.append("evaluate")
    model.evaluate(X[:9], Y[:9], batch_size=4, verbose=0)
    EVENTS.append("predict")
    model.predict(X[:9], batch_size=4, verbose=0)
    model.predict(X[:8], batch_size=4, verbose=0)
    return model


def notes_of(program):
    """Checks that a program notes the same on every rank as in one process."""

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


@notes_of
def check_calls_of_the_first_step(scope):
    """Of arrays in order, which nothing has numbered before; the last batch is shorter."""
    assert int(STRATEGY.keras_steps.rows_trained) == 0, "the first check of a launch must be this one"
    with scope:
        model = compiled(without_input())
    model.fit(X[:10], Y[:10], batch_size=4, shuffle=False, verbose=0)
    EVENTS.append("evaluate")
    model.evaluate(X[:10], Y[:10], batch_size=4, verbose=0)


@long
@notes_of
def check_calls_of_a_model_without_an_input(scope):
    fits_and_evaluations(scope, without_input)


@long
@notes_of
def check_calls_of_a_step_of_ones_own(scope):
    with scope:
        model = OwnStep()
        model.compile(NotedSGD(0.05))
    model.fit(X[:9], Y[:9], batch_size=4, epochs=2, verbose=0)
    model.predict(X[:6], batch_size=4, verbose=0)
    model.fit(X[:9], Y[:9], batch_size=4, verbose=0)


@long
@notes_of
def check_calls_of_several_steps_of_predict_that_make_variables(scope):
    with scope:
        model = compiled(without_input(), steps_per_execution=2)
    model.predict(X[:10], batch_size=4, verbose=0)


@long
@notes_of
def check_calls_in_eager_mode(scope):
    with scope:
        model = compiled(without_input(), run_eagerly=True)
    model.fit(X[:9], Y[:9], batch_size=4, epochs=2, verbose=0)
    model.evaluate(X[:9], Y[:9], batch_size=4, verbose=0)


# ---- what depends on it ----------------------------------------------------------------------------------------------


class Drawing(layers.Layer):
    """Draws with Python's generator whenever it is traced, as augmentations do."""

    def call(self, x):
        return x * random.random() + random.choice([-1.0, 1.0])


@long
@case()
def check_numbers_that_python_draws_while_it_traces(scope):
    with scope:
        model = keras.Sequential([Drawing(), layers.Dense(4, activation="tanh"), Drawing(), layers.Dense(2)])
        model.compile(keras.optimizers.SGD(0.05), "mse")
    return fit(model, validation_split=0.2)


class ScheduleFree(keras.optimizers.Optimizer):
    """Keeps, for each weight, where it was when the optimizer was built, as schedule-free methods do."""

    def build(self, variables):
        super().build(variables)
        self.starts = self.add_optimizer_variables(variables, "start", initializer="zeros")
        for start, variable in zip(self.starts, variables):
            start.assign(variable)
        self.draw = random.random()

    def update_step(self, gradient, variable, learning_rate):
        start = self.starts[self._get_variable_index(variable)]
        rate = keras.ops.cast(learning_rate, variable.dtype)
        self.assign_sub(start, rate * gradient * self.draw)
        self.assign(variable, 0.9 * variable + 0.1 * start)


@long
@case()
def check_an_optimizer_that_depends_on_when_it_is_built(scope):
    class Shifted(layers.Layer):
        """Changes a weight when it is called for the first time."""

        def build(self, shape):
            self.shift = self.add_weight(shape=(shape[-1],), initializer="zeros")

        def call(self, x):
            self.shift.assign_add(keras.ops.ones_like(self.shift))
            return x + self.shift

    with scope:
        model = keras.Sequential([keras.Input((6,)), Shifted(), layers.Dense(2)])
        model.compile(ScheduleFree(0.05), "mse")
    return fit(model)
