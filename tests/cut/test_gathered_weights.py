"""Weights of which each rank holds a chunk, gathered only while a step uses them: sharding="weights"."""

import keras
import numpy as np
import pytest
from cut.layouts import transformer
from cut.simulated import Simulation

from keras_ddl.compat.tensorflow import tf

RNG = np.random.default_rng(4)
NOTHING, EVERYTHING = 1, 1 << 30  # limits for the bytes of weights gathered at a time


class Trained:
    """A Keras model in a training step; weights of at least `least` entries are sharded with their slots."""

    def __init__(self, model, batch, *, size=3, bound=NOTHING, optimizer=None, least=4, loss=None, static=True):
        self.model, self.batch = model, batch
        optimizer = optimizer or keras.optimizers.Adam(1e-2)
        weights = model.trainable_variables
        optimizer.build(weights)
        loss = loss or (lambda outputs: tf.reduce_mean(tf.square(outputs)))

        def step(*batch):
            with tf.GradientTape() as tape:
                value = loss(model(batch[0] if len(batch) == 1 else batch, training=True))
                value += sum(model.losses)
                scaled = optimizer.scale_loss(value)
            optimizer.apply(tape.gradient(scaled, [each.value for each in weights]), weights)
            return value

        self.variables = [each.value for each in [*model.variables, *optimizer.variables]]
        large = [v for v in [*weights, *optimizer.variables] if np.prod(v.shape) >= least and v.dtype == "float64"]
        self.sharded = [each.value for each in large]
        held = [each.value.handle for each in weights if any(each is other for other in large)]
        self.simulation = Simulation(
            step, [*batch], size, variables=self.variables, sharded=self.sharded, static=static,
            weights=held, gathered_bytes=bound,
        )  # fmt: skip

    def train(self, steps=2):
        return self.simulation.check(*self.batch, steps=steps).reports[0]


@pytest.fixture(autouse=True)
def seeded(float64):
    keras.utils.set_random_seed(3)


def mlp(layers=4, **options):
    dense = [keras.layers.Dense(7, activation="tanh", **options) for _ in range(layers)]
    return keras.Sequential([keras.Input((7,)), *dense])


X = RNG.normal(size=(7, 7))


def gathers(report):
    return [each for each in report.entries if each.kind == "all_gather"]


@pytest.mark.parametrize(
    ("size", "static"), [(3, True), *(pytest.param(*each, marks=pytest.mark.long) for each in ((2, True), (3, False)))]
)
def test_sharded_weights_equal_one_process(size, static):
    report = Trained(mlp(), [X], size=size, least=8, static=static).train()
    again = [each for each in gathers(report) if "again" in each.reason]
    # The last layer's backward pass follows its forward pass at once; none needs the first layer's weight again.
    assert len(gathers(report)) == 4 + 2 and len(again) == 2, report.text()
    assert {each.kind for each in report.entries} == {"all_gather", "reduce_scatter", "sum"}, report.text()


def transformer_and_tokens():
    return transformer(blocks=1), [RNG.integers(0, 16, (7, 5)).astype("int32")]


class Tied(keras.Model):
    """The embedding's table is also the kernel of the output layer."""

    def __init__(self):
        super().__init__()
        self.table, self.dense = keras.layers.Embedding(9, 5), keras.layers.Dense(5)
        self.table.build((None, 4))
        self.dense.build((None, 4, 5))
        self.built = True

    def call(self, tokens):
        return keras.ops.matmul(self.dense(self.table(tokens)), keras.ops.transpose(self.table.embeddings))


class Normalized(keras.layers.Layer):
    """A loop that needs all rows of the batch in each round."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], shape[-1]), name="kernel")

    def call(self, x):
        rounds = lambda n, y: (n + 1, tf.nn.softmax(tf.matmul(y, self.kernel), axis=0))  # noqa: E731
        return tf.while_loop(lambda n, y: n < 2, rounds, (0, x), maximum_iterations=2)[1]


class Multiplied(keras.layers.Layer):
    """Uses two weights separately and then multiplies them."""

    def build(self, shape):
        self.one, self.other = (self.add_weight(shape=(shape[-1], shape[-1]), name=name) for name in ("one", "other"))

    def call(self, x):
        return tf.matmul(tf.matmul(x, self.one), tf.matmul(self.one, self.other))


MODELS = {
    "transformer": transformer_and_tokens,
    "tied": lambda: (Tied(), [RNG.integers(0, 9, (7, 4)).astype("int32")]),
    "replicated loop": lambda: (keras.Sequential([keras.Input((X.shape[1],)), Normalized()]), [X]),
    "multiplied": lambda: (keras.Sequential([keras.Input((X.shape[1],)), Multiplied()]), [X]),
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "bound"),
    [("transformer", NOTHING), ("transformer", 500), ("transformer", EVERYTHING)]
    + [(name, NOTHING) for name in MODELS if name != "transformer"],
)
def test_layers_with_sharded_weights_equal_one_process(name, bound):
    model, batch = MODELS[name]()
    report = Trained(model, batch, bound=bound).train()
    assert bound != EVERYTHING or not any("again" in each.reason for each in gathers(report))


OPTIMIZERS = {
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.1, weight_decay=0.1, use_ema=True),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(1e-2, clipnorm=0.1), initial_scale=64.0, dynamic_growth_steps=2
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_of_sharded_weights_equal_one_process(name):
    model, batch = MODELS["tied"]()
    Trained(model, batch, optimizer=OPTIMIZERS[name](), least=8).train(3)
