"""`batch_statistics="rank"`: what one process computes that normalises each rank's rows by themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from cut.chunks import MOMENTUM, Chunks
from cut.simulated import Simulation, chunks

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut import own_statistics
from keras_ddl.cut.program import Program

layers = keras.layers
ROWS = 7


def keras_layer(axis: int = -1, epsilon: float = 1e-3) -> keras.Layer:
    return layers.BatchNormalization(axis=axis, momentum=MOMENTUM, epsilon=epsilon)


Normalize = Callable[..., keras.Layer]


def dense(normalize: Normalize) -> keras.Model:
    return keras.Sequential([
        keras.Input((5,)), normalize(), layers.Dense(6, activation="tanh"), normalize(), layers.Dense(2),
    ])  # fmt: skip


def convolutional(normalize: Normalize) -> keras.Model:
    x = inputs = keras.Input((6, 6, 2))
    for filters in (3, 4):
        x = layers.ReLU()(normalize()(layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)))
        x = layers.MaxPooling2D()(x)
    return keras.Model(inputs, layers.Dense(2)(layers.GlobalAveragePooling2D()(x)))


def of_channels_first(normalize: Normalize) -> keras.Model:
    inputs = keras.Input((4, 3, 3))
    hidden = normalize(axis=1)(layers.Dense(3)(inputs))
    return keras.Model(inputs, layers.Dense(2)(layers.Flatten()(hidden)))


def of_sequences(normalize: Normalize) -> keras.Model:
    inputs = keras.Input((4, 3))
    hidden = normalize()(layers.Dense(5)(inputs))
    return keras.Model(inputs, layers.Dense(2)(layers.LSTM(4)(hidden)))


def nested_and_shared(normalize: Normalize) -> keras.Model:
    block = keras.Sequential([layers.Dense(5), normalize(), layers.Activation("tanh")])
    inputs = keras.Input((5,))
    return keras.Model(inputs, layers.Dense(2)(block(block(inputs) + inputs)))


LONG = pytest.mark.long
pytestmark = pytest.mark.usefixtures("float64")


class Training:
    """A model with normalisation of some kind, its optimizer, and a step."""

    def __init__(
        self, build: Callable[[Normalize], keras.Model], normalize: Normalize, loss: Callable[..., Any] | None = None
    ) -> None:
        keras.utils.set_random_seed(5)
        self.model, self.loss = build(normalize), loss or self.mean_error
        model = self.model
        rng = np.random.default_rng(2)
        model.set_weights([rng.uniform(0.1, 0.9, size=each.shape) for each in model.get_weights()])
        self.optimizer = keras.optimizers.SGD(1e-2, momentum=0.9, global_clipnorm=1.0)
        self.optimizer.build(model.trainable_variables)

    @staticmethod
    def mean_error(model: keras.Model, x: Any, y: Any) -> Any:
        actual = model(x, training=True)
        return tf.reduce_mean(tf.square(tf.cast(actual, y.dtype) - y)) + sum(model.losses)

    @property
    def variables(self) -> list[tf.Variable]:
        return [each.value for each in (*self.model.variables, *self.optimizer.variables)]

    def step(self, x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = self.loss(self.model, x, y)
        weights = self.model.trainable_variables
        self.optimizer.apply(tape.gradient(loss, [each.value for each in weights]), weights)
        return loss


def data(model: keras.Model, rows: int = ROWS) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(rows)
    return rng.normal(size=(rows, *model.input_shape[1:])) + 0.5, rng.normal(size=(rows, 2))


def simulated(training: Training, size: int, rows: int = ROWS, *, statistics: str = "rank", **options: Any) -> Any:
    arguments = data(training.model, rows)
    return Simulation(
        training.step, arguments, size, variables=training.variables, batch_statistics=statistics, **options
    )


def assert_trains_as(one: Training, cut: Training, simulation: Simulation, rows: int = ROWS, steps: int = 3) -> None:
    """Checks losses, weights and statistics of `cut` on ranks against `one` in this process."""
    x, y = data(one.model, rows)
    step = tf.function(one.step, autograph=False)
    for _ in range(steps):
        expected = step(x, y)
        for actual in simulation(x, y):
            np.testing.assert_allclose(actual[0], expected, rtol=1e-11, atol=1e-12)
    for copies in simulation.copies:
        for mine, theirs in zip(cut.variables, one.variables, strict=True):
            np.testing.assert_allclose(copies[id(mine.handle)], theirs, rtol=1e-10, atol=1e-11)
    first = simulation.copies[0]
    for copies in simulation.copies[1:]:
        assert all(copies[key].numpy().tobytes() == first[key].numpy().tobytes() for key in first)


def chunked(size: int) -> Normalize:
    return lambda **given: Chunks(lambda rows: [count for _, count in chunks(rows, size)], **given)


CASES = [(dense, 2, True), (convolutional, 3, False), (of_channels_first, 2, False), (of_sequences, 3, True),
         (nested_and_shared, 3, False)]  # fmt: skip


@pytest.mark.parametrize(
    ("build", "size", "static"),
    [each if each[0] is convolutional else pytest.param(*each, marks=LONG) for each in CASES],
)
def test_rank_equals_one_process_that_normalizes_each_rank_s_rows(build: Any, size: int, static: bool) -> None:
    cut, one = Training(build, keras_layer), Training(build, chunked(size))
    simulation = simulated(cut, size, static=static)
    assert_trains_as(one, cut, simulation)
    report = simulation.reports[0]
    assert (report.own_statistics > 0, report.statistics_left) == (True, 0)
    assert [each.kind for each in report.entries if each.kind == "gather"] == []


def moved(training: Training, **options: Any) -> list[Any]:
    """Returns the collectives of a step."""
    simulation = simulated(training, 2, **options)
    simulation(*data(training.model))
    return simulation.reports[0].entries


@pytest.mark.parametrize(
    ("build", "static"), [pytest.param(dense, False, marks=LONG), pytest.param(nested_and_shared, True, marks=LONG)]
)
def test_rank_moves_moments_in_one_bucket_with_gradients_and_loss(build: Any, static: bool) -> None:
    training = Training(build, keras_layer)
    # Of each layer the mean, the variance, and in the backward pass one sum; then the gradients of layers before it.
    assert len(moved(training, static=static, statistics="global")) in (2 * 3, 2 * 3 + 1)
    entries = moved(training, static=static)
    moments = 2 * 2
    assert [len(each.values) for each in entries] == [1 + len(training.model.trainable_variables) + moments]


@LONG
@pytest.mark.parametrize(("epsilon", "static"), [(0.0, False), (1e-3, True)])
def test_rank_without_rows_has_no_share(epsilon: float, static: bool) -> None:
    rows, size = 4, 3  # 2, 2 and 0

    def uneven(_: int, __: int) -> list[tuple[int, int]]:
        return [(0, 2), (2, 2), (4, 0)]

    cut = Training(dense, lambda: keras_layer(epsilon=epsilon))
    one = Training(dense, lambda: Chunks(lambda _: [2, 2, 0], epsilon=epsilon))
    simulation = simulated(cut, size, rows, static=static, chunks=uneven)
    assert_trains_as(one, cut, simulation, rows)
    assert simulation.reports[0].own_statistics == 2


@LONG
def test_batch_of_one_row_is_one_rank_s() -> None:
    """Tracing sees that there is one row: the gradients are not summed along axis 0 then."""

    def build(normalize: Normalize) -> keras.Model:
        return keras.Sequential([keras.Input((3, 2)), normalize()])

    cut, one = Training(build, keras_layer), Training(build, keras_layer)
    assert_trains_as(one, cut, simulated(cut, 2, rows=1), rows=1, steps=2)


# ---- what is left to the whole batch


class WeighedByRow(layers.BatchNormalization):
    """With a weight for each of as many rows as there are features: its gradient has the shape of a statistic."""

    def build(self, shape: Any) -> None:
        super().build(shape)
        self.by_row = self.add_weight(shape=(6, 1), initializer="ones")

    def call(self, x: Any, training: bool = False, mask: Any = None) -> Any:
        return super().call(x, training=training) * self.by_row


class OwnMoments(layers.Layer):
    """A user's own layer, with names as Keras's has them."""

    def build(self, shape: Any) -> None:
        self.moving_mean = self.add_weight(shape=(shape[-1],), initializer="zeros", trainable=False)

    def call(self, x: Any, training: bool = False) -> Any:
        mean, variance = tf.nn.moments(x, [0])
        self.moving_mean.assign(self.moving_mean * 0.9 + mean * 0.1)
        return tf.nn.batch_normalization(x, mean, variance, None, None, 1e-3)


class Penalized(layers.BatchNormalization):
    """Makes more of the moments than Keras does."""

    def _moments(self, inputs: Any, mask: Any) -> Any:
        mean, variance = super()._moments(inputs, mask)
        self.add_loss(tf.reduce_sum(tf.square(mean)))
        return mean, variance


class Chosen(layers.BatchNormalization):
    """In a branch."""

    def call(self, x: Any, training: bool = False, mask: Any = None) -> Any:
        normalize = super().call
        return tf.cond(tf.reduce_sum(x) > -1e9, lambda: normalize(x, training=True), lambda: x)


class Repeated(layers.BatchNormalization):
    """In a loop."""

    def call(self, x: Any, training: bool = False, mask: Any = None) -> Any:
        normalize = super().call
        return tf.while_loop(lambda i, x: i < 2, lambda i, x: (i + 1, normalize(x, training=True)), (0, x))[1]


class Called(layers.BatchNormalization):
    """In a function of its own, whose gradient is a function, too."""

    def build(self, shape: Any) -> None:
        super().build(shape)
        self.function = tf.function(lambda x: super(Called, self).call(x, training=True), autograph=False)

    def call(self, x: Any, training: bool = False, mask: Any = None) -> Any:
        return self.function(x)


def frozen() -> keras.Layer:
    layer = keras_layer()
    layer.trainable = False
    return layer


def masked(_: Normalize) -> keras.Model:
    inputs = keras.Input((5,))
    words = layers.Reshape((5, 1))(layers.ReLU()(inputs))
    hidden = keras_layer()(layers.Dense(3)(layers.Masking()(words)))
    return keras.Model(inputs, layers.Dense(2)(layers.GlobalAveragePooling1D()(hidden)))


LEFT = [
    lambda: layers.BatchNormalization(synchronized=True), frozen, lambda: layers.BatchNormalization(renorm=True),
    OwnMoments, Penalized, Chosen, Repeated, Called, layers.LayerNormalization, lambda: layers.GroupNormalization(1),
]  # fmt: skip


def assert_left(build: Any, normalize: Normalize, loss: Any = None) -> None:
    """Checks that "rank" is "global" here."""
    cut, one = Training(build, normalize, loss), Training(build, normalize, loss)
    simulation = simulated(cut, 2)
    assert_trains_as(one, cut, simulation)
    assert simulation.reports[0].own_statistics == 0


@LONG
def test_other_statistics_are_those_of_one_process() -> None:
    def build(_: Normalize) -> keras.Model:
        stack = [each for make in LEFT for each in (layers.Dense(4, activation="tanh"), make())]
        return keras.Sequential([keras.Input((5,)), *stack, layers.Dense(2)])

    assert_left(build, keras_layer)


@LONG
def test_statistics_are_those_of_one_process_where_sums_of_their_shape_are_of_features() -> None:
    cut, one = (
        Training(lambda normalize: keras.Sequential([keras.Input((6,)), layers.Dense(6), normalize()]), WeighedByRow)
        for _ in range(2)
    )
    x = np.random.default_rng(0).normal(size=(6, 6))
    simulation = Simulation(cut.step, (x, x), 2, variables=cut.variables, batch_statistics="rank")
    expected = one.step(x, x)
    for actual in simulation(x, x):
        np.testing.assert_allclose(actual[0], expected, rtol=1e-11)
    for mine, theirs in zip(cut.variables, one.variables, strict=True):
        np.testing.assert_allclose(simulation.copies[1][id(mine.handle)], theirs, rtol=1e-10, atol=1e-11)


@LONG
def test_masked_statistics_are_those_of_one_process() -> None:
    assert_left(masked, keras_layer)


@LONG
def test_inference_statistics_are_those_of_one_process() -> None:
    assert_left(dense, keras_layer, lambda model, x, y: tf.reduce_mean(tf.square(model(x, training=False) - y)))


@LONG
def test_statistics_with_a_second_gradient_are_those_of_one_process() -> None:
    def loss(model: Any, x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            actual = model(x, training=True)
        return tf.reduce_mean(tf.square(actual - y)) + tf.reduce_mean(tf.square(tape.gradient(actual, x)))

    assert_left(dense, keras_layer, loss)


# ---- one layer, several gradients


def two_sided(model: Any, x: Any, y: Any) -> Any:
    """As in an adversarial step: a call without a gradient, and one with two."""
    fake = tf.stop_gradient(model(x * 2.0, training=True))
    with tf.GradientTape() as tape:
        actual = model(x, training=True)
        errors = tf.reduce_mean(tf.square(actual - y))
    inner = tape.gradient(errors, model.trainable_variables[0].value)
    return errors + tf.reduce_mean(tf.square(actual - fake)) + tf.reduce_sum(tf.stop_gradient(tf.abs(inner)))


def both_in_one(model: Any, x: Any, y: Any) -> Any:
    """Two batches one after the other, of each of which a rank has its rows."""
    actual = model(tf.concat([x, x * 3.0 - 1.0], 0), training=True)
    return tf.reduce_mean(tf.square(actual[: x.shape[0]] - y)) + tf.reduce_mean(tf.abs(actual[x.shape[0] :]))


@LONG
def test_rank_with_a_call_without_gradient_and_one_with_two() -> None:
    size = 3
    cut, one = Training(dense, keras_layer, two_sided), Training(dense, chunked(size), two_sided)
    simulation = simulated(cut, size)
    assert_trains_as(one, cut, simulation)
    assert simulation.reports[0].own_statistics == 4


@LONG
def test_rank_with_batches_one_after_the_other() -> None:
    cut, one = (
        Training(dense, keras_layer, both_in_one),
        Training(dense, lambda **given: chunked(2)(batches=2, **given), both_in_one),
    )
    simulation = simulated(cut, 2)
    assert_trains_as(one, cut, simulation)
    assert simulation.reports[0].own_statistics == 2


@LONG
def test_rank_with_a_model_that_is_recomputed() -> None:
    def loss(model: Any, x: Any, y: Any) -> Any:
        return tf.reduce_mean(tf.square(tf.recompute_grad(lambda x: model(x, training=True))(x) - y))

    cut, one = Training(dense, keras_layer, loss), Training(dense, chunked(2), loss)
    simulation = simulated(cut, 2)
    assert_trains_as(one, cut, simulation)
    assert simulation.reports[0].own_statistics == 4  # two layers, and both once more


@LONG
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16", "float16"])
def test_rank_with_half_precision(policy: str) -> None:
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy(policy)
    cut, one = Training(dense, keras_layer), Training(dense, chunked(2))
    x, y = (each.astype("float32") for each in data(cut.model))
    simulation = Simulation(cut.step, (x, y), 2, variables=cut.variables, batch_statistics="rank")
    expected = one.step(x, y)
    for actual in simulation(x, y):
        np.testing.assert_allclose(actual[0], expected, rtol=0.05)
    assert simulation.reports[0].own_statistics == 2
    for mine, theirs in zip(cut.variables, one.variables, strict=True):
        actual = simulation.copies[0][id(mine.handle)]
        np.testing.assert_allclose(tf.cast(actual, tf.float32), tf.cast(theirs, tf.float32), rtol=0.05, atol=0.02)


@LONG
def test_statistics_are_found_whatever_layers_are_called() -> None:
    def named(first: str, second: str) -> list[list[str]]:
        names = iter([first, second])
        training = Training(dense, lambda: layers.BatchNormalization(name=next(names)))
        x, y = data(training.model)
        calls, left = own_statistics.find(Program(tf.function(training.step).get_concrete_function(x, y).graph))
        assert left == 0
        return [list(call.roles.values()) for call in calls]

    assert named("a", "b") == named("a_1", "a") == named("moments", "gradient_tape") != []
