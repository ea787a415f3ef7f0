"""`batch_statistics="rank"`: what one process computes that normalises each rank's rows by themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import pytest
from cut.simulated import Simulation, chunks

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut import own_statistics
from keras_ddl.cut.program import Program

layers = keras.layers
ROWS = 7
MOMENTUM = 0.9


class Chunks(layers.Layer):
    """The oracle: normalises parts of the batch one by one, in plain TensorFlow."""

    def __init__(self, counts: Sequence[int], axis: int = -1, epsilon: float = 1e-3) -> None:
        super().__init__()
        self.counts, self.axis, self.own_epsilon = [each for each in counts if each], axis, epsilon

    def build(self, shape: Any) -> None:
        size = (shape[self.axis],)
        self.gamma = self.add_weight(shape=size, initializer="ones", name="gamma")
        self.beta = self.add_weight(shape=size, initializer="zeros", name="beta")
        self.moving_mean = self.add_weight(shape=size, initializer="zeros", trainable=False, name="moving_mean")
        self.moving_variance = self.add_weight(shape=size, initializer="ones", trainable=False, name="moving_variance")

    def call(self, x: Any, training: bool = False) -> Any:
        rank = x.shape.rank
        axes = [axis for axis in range(rank) if axis != self.axis % rank]
        channels = [1 if axis in axes else -1 for axis in range(rank)]
        found, means, variances = [], 0.0, 0.0
        for part in tf.split(x, self.counts):
            mean = tf.reduce_mean(part, axes, keepdims=True)
            variance = tf.reduce_mean(tf.square(part - mean), axes, keepdims=True)
            found.append((part - mean) / tf.sqrt(variance + self.own_epsilon))
            share = tf.cast(tf.shape(part)[0] / tf.shape(x)[0], x.dtype)
            means, variances = means + share * tf.reshape(mean, [-1]), variances + share * tf.reshape(variance, [-1])
        self.moving_mean.assign(self.moving_mean * MOMENTUM + means * (1 - MOMENTUM))
        self.moving_variance.assign(self.moving_variance * MOMENTUM + variances * (1 - MOMENTUM))
        return tf.concat(found, 0) * tf.reshape(self.gamma, channels) + tf.reshape(self.beta, channels)


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


MODELS = [dense, convolutional, of_channels_first, of_sequences, nested_and_shared]


@pytest.fixture(autouse=True)
def _precision() -> Any:
    before = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_floatx(before[0])
    keras.config.set_dtype_policy(before[1])


class Training:
    """A model, its optimizer, and a step."""

    def __init__(self, model: keras.Model, loss: Callable[..., Any] | None = None) -> None:
        self.model, self.loss = model, loss or self.mean_error
        rng = np.random.default_rng(2)
        model.set_weights([rng.uniform(0.1, 0.9, size=each.shape) for each in model.get_weights()])
        self.optimizer = keras.optimizers.Adam(1e-2, global_clipnorm=1.0)
        self.optimizer.build(model.trainable_variables)

    @staticmethod
    def mean_error(model: keras.Model, x: Any, y: Any) -> Any:
        return tf.reduce_mean(tf.square(model(x, training=True) - y))

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
        for found in simulation(x, y):
            np.testing.assert_allclose(found[0], expected, rtol=1e-11, atol=1e-12)
    for copies in simulation.copies:
        pairs = [pair for pair in zip(cut.variables, one.variables, strict=True) if pair[0].dtype != tf.uint32]
        for mine, theirs in pairs:  # but for the seeds of dropout
            np.testing.assert_allclose(copies[id(mine.handle)], theirs, rtol=1e-10, atol=1e-11)
    first = simulation.copies[0]
    for copies in simulation.copies[1:]:
        assert all(copies[key].numpy().tobytes() == first[key].numpy().tobytes() for key in first)


def rows_of(rows: int, size: int) -> list[int]:
    return [count for _, count in chunks(rows, size)]


@pytest.mark.parametrize("static", [True, False], ids=["static", "symbolic"])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("build", MODELS)
def test_rank_equals_one_process_that_normalizes_each_rank_s_rows(build: Any, size: int, static: bool) -> None:
    cut = Training(build(keras_layer))
    one = Training(build(lambda **given: Chunks(rows_of(ROWS, size), **given)))
    simulation = simulated(cut, size, static=static)
    assert_trains_as(one, cut, simulation)
    report = simulation.reports[0]
    assert (report.own_statistics > 0, report.statistics_left) == (True, 0)
    assert [each.kind for each in report.entries if each.kind == "gather"] == []
