"""`batch_statistics="rank"`: what one process computes that normalises each rank's rows by themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from cut.chunks import MOMENTUM, Chunks
from cut.comparing import difference
from cut.simulated import Simulation, chunks

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.analysis.program import Program
from keras_ddl.cut.batch_statistics import detection

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


def simulated(training: Training, size: int, rows: int = ROWS, **options: Any) -> Simulation:
    options = {"variables": training.variables, "batch_statistics": "rank", **options}
    return Simulation(training.step, data(training.model, rows), size, **options)


def assert_trains_as(one: Training, cut: Training, simulation: Simulation, rows: int = ROWS, steps: int = 3) -> None:
    """Checks losses, weights and statistics of `cut` on ranks against `one` in this process."""
    x, y = data(one.model, rows)
    step = tf.function(one.step, autograph=False)
    for _ in range(steps):
        expected = [step(x, y)]
        for actual in simulation(x, y):
            assert difference(actual, expected, 1e-11) is None
    for mine, theirs in zip(cut.variables, one.variables, strict=True):
        held = simulation.held(mine)
        assert all(each.tobytes() == held[0].tobytes() for each in held)
        assert difference(held[:1], [theirs.numpy()], 1e-10) is None, theirs.name


def chunked(size: int, **options: Any) -> Normalize:
    return lambda **given: Chunks(lambda rows: [count for _, count in chunks(rows, size)], **options, **given)


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


def recomputed(model: Any, x: Any, y: Any) -> Any:
    return tf.reduce_mean(tf.square(tf.recompute_grad(lambda x: model(x, training=True))(x) - y))


@pytest.mark.parametrize(
    ("build", "loss", "size", "static", "calls"),
    [
        (convolutional, None, 3, False, 2),
        pytest.param(of_channels_first, None, 2, False, 1, marks=LONG),
        pytest.param(nested_and_shared, None, 3, False, 2, marks=LONG),
        pytest.param(dense, two_sided, 3, True, 4, marks=LONG),
        pytest.param(dense, both_in_one, 2, True, 2, marks=LONG),
        pytest.param(dense, recomputed, 2, True, 4, marks=LONG),  # two layers, and both once more
    ],
)
def test_rank_equals_one_process_that_normalizes_each_rank_s_rows(
    build: Any, loss: Any, size: int, static: bool, calls: int
) -> None:
    normalize = chunked(size, batches=2) if loss is both_in_one else chunked(size)
    cut, one = Training(build, keras_layer, loss), Training(build, normalize, loss)
    simulation = simulated(cut, size, static=static)
    assert_trains_as(one, cut, simulation)
    report = simulation.reports[0]
    assert (report.own_statistics, report.global_statistics) == (calls, 0)
    assert loss is not None or simulation.gathers() == []


@LONG
@pytest.mark.parametrize(("epsilon", "static"), [(0.0, False), (1e-3, True)])
def test_rank_without_rows_has_no_share(epsilon: float, static: bool) -> None:
    cut = Training(dense, lambda: keras_layer(epsilon=epsilon))
    one = Training(dense, lambda: Chunks(lambda _: [2, 2, 0], epsilon=epsilon))
    simulation = simulated(cut, 3, 4, static=static, chunks=lambda _, __: [(0, 2), (2, 2), (4, 0)])
    assert_trains_as(one, cut, simulation, 4)
    assert simulation.reports[0].own_statistics == 2


@LONG
def test_batch_of_one_row_is_one_rank_s() -> None:
    """Tracing sees that there is one row: the gradients are not summed along axis 0 then."""
    cut = Training(lambda normalize: keras.Sequential([keras.Input((3, 2)), normalize()]), keras_layer)
    simulated(cut, 2, rows=1).check(*data(cut.model, 1), steps=2)


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


def masked(_: Normalize) -> keras.Model:
    inputs = keras.Input((5,))
    words = layers.Reshape((5, 1))(layers.ReLU()(inputs))
    hidden = keras_layer()(layers.Dense(3)(layers.Masking()(words)))
    return keras.Model(inputs, layers.Dense(2)(layers.GlobalAveragePooling1D()(hidden)))


LEFT = [
    *(lambda option=option: layers.BatchNormalization(**option)
      for option in ({"synchronized": True}, {"trainable": False}, {"renorm": True})),
    OwnMoments, Penalized, Chosen, Repeated, Called, layers.LayerNormalization, lambda: layers.GroupNormalization(1),
]  # fmt: skip


def stacked(_: Normalize) -> keras.Model:
    stack = [each for make in LEFT for each in (layers.Dense(4, activation="tanh"), make())]
    return keras.Sequential([keras.Input((5,)), *stack, layers.Dense(2)])


def weighed_by_row(_: Normalize) -> keras.Model:
    return keras.Sequential([keras.Input((6,)), layers.Dense(6), WeighedByRow()])


def in_inference(model: Any, x: Any, y: Any) -> Any:
    return tf.reduce_mean(tf.square(model(x, training=False) - y))


def of_a_second_gradient(model: Any, x: Any, y: Any) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(x)
        actual = model(x, training=True)
    return tf.reduce_mean(tf.square(actual - y)) + tf.reduce_mean(tf.square(tape.gradient(actual, x)))


@LONG
@pytest.mark.parametrize(
    ("build", "loss"),
    [(stacked, None), (masked, None), (dense, in_inference), (dense, of_a_second_gradient)],
)
def test_other_statistics_are_those_of_one_process(build: Any, loss: Any) -> None:
    cut = Training(build, keras_layer, loss)
    assert simulated(cut, 2).check(*data(cut.model), steps=3, tolerance=1e-10).reports[0].own_statistics == 0


@LONG
def test_statistics_are_those_of_one_process_where_sums_of_their_shape_are_of_features() -> None:
    cut = Training(weighed_by_row, keras_layer)
    x = np.random.default_rng(0).normal(size=(6, 6))
    Simulation(cut.step, (x, x), 2, variables=cut.variables, batch_statistics="rank").check(x, x, tolerance=1e-10)


@LONG
@pytest.mark.parametrize("policy", ["mixed_float16", "float16"])
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
        calls, left = detection.find(Program(tf.function(training.step).get_concrete_function(x, y).graph))
        assert left == 0
        return [list(call.roles.values()) for call in calls]

    assert named("a", "b") == named("a_1", "a") == named("moments", "gradient_tape") != []
