"""Embeddings with repeated tokens: optimizers equal one process, and the smaller of table and gradient rows is sent."""

import keras
import numpy as np
import pytest
from cut.mesh import variables_of
from cut.simulated import Simulation

from keras_ddl.compat.tensorflow import tf

RNG = np.random.default_rng(0)
TOKENS, LABELS = RNG.integers(0, 9, [12, 6]), RNG.normal(size=(12, 1))
OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "clipped": lambda: keras.optimizers.Adam(0.1, global_clipnorm=0.1),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.1),
}


def _trained(optimizer, rows, tied, static):
    """Compares two steps with one process and returns the report."""
    embedding = keras.layers.Embedding(rows, 8, dtype="float64")
    head = keras.layers.Dense(1, dtype="float64")
    embedding.build()
    head.build((None, 8))
    weights = [*embedding.trainable_variables, *head.trainable_variables]
    optimizer.build(weights)

    def step(tokens, labels):
        with tf.GradientTape() as tape:
            vectors = tf.tanh(tf.reduce_mean(embedding(tokens), 1))
            loss = tf.reduce_mean(tf.square(head(vectors) - labels))
            if tied:
                loss += tf.reduce_mean(tf.square(vectors @ tf.transpose(embedding.embeddings.value)))
        optimizer.apply(tape.gradient(loss, [each.value for each in weights]), weights)
        return loss

    simulation = Simulation(
        step, (TOKENS, LABELS), 3, static=static, variables=variables_of(embedding, head, optimizer)
    )
    return simulation.check(TOKENS, LABELS, steps=2).reports[0]


LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("optimizer", "tied", "rows", "static"),
    [
        ("sgd", False, 500, True),
        *(pytest.param(each, False, 500, True, marks=LONG) for each in OPTIMIZERS if each != "sgd"),
        pytest.param("clipped", False, 10, True, marks=LONG),
        pytest.param("clipped", False, 500, False, marks=LONG),
        pytest.param("sgd", True, 500, True, marks=LONG),
    ],
)
def test_table_updates_equal_one_process(optimizer, tied, rows, static):
    report = _trained(OPTIMIZERS[optimizer](), rows, tied, static)
    gathers = [each for each in report.entries if each.kind == "gather"]
    sums = max(each.bytes for each in report.entries if each.kind == "sum")
    table, values = rows * 8 * 8, TOKENS.size * 8 * 8
    if optimizer == "rmsprop" and not tied:
        return  # it needs unique tokens, which have no rule
    if tied or 2 * table < values or not static:
        assert gathers == [] and sums >= table, report.text()
    else:
        assert sums < table and all(each.bytes <= values for each in gathers), report.text()
        assert report.large_gathers(0) == [] and report.replicated == {}, report.text()  # no rule is missing
        assert "fewer bytes than the table" in report.text()
