"""Adapted preprocessing layers of Keras in a step equal one process; the tests also check what they gather."""

import keras
import numpy as np
import pytest
from cut.simulated import Simulation

from keras_ddl.compat.tensorflow import tf

layers = keras.layers
WORDS = np.array([f"word{i} Also{i % 3}, more" for i in range(7)])
NUMBERS = np.arange(14.0).reshape(7, 2)


def _adapted(layer, data):
    layer.adapt(data)
    return layer


def _cases():
    vectors, category = layers.TextVectorization, layers.CategoryEncoding
    mixed = np.concatenate([WORDS[:4], ["unknown"] * 3])
    entries = np.arange(7)[:, None] % 6
    yield "string-lookup-of-many", _adapted(layers.StringLookup(output_mode="multi_hot"), WORDS), mixed[:, None], []
    yield "inverted-lookup", layers.StringLookup(vocabulary=["a", "b"], invert=True), np.arange(7) % 4, []
    yield "integer-lookup", _adapted(layers.IntegerLookup(), np.arange(5)), np.arange(14).reshape(7, 2), []
    for mode in ("int", "tf_idf"):
        yield f"texts-{mode}", _adapted(vectors(output_mode=mode), WORDS), mixed, ["StringSplitV2"]
    yield "hashing-with-salt", layers.Hashing(5, salt=3), mixed[:, None], []
    for mode in ("one_hot", "multi_hot", "count"):
        yield f"category-{mode}", category(6, output_mode=mode), entries, []
    yield "bins", _adapted(layers.Discretization(num_bins=3), NUMBERS), NUMBERS, []
    yield "normalization", _adapted(layers.Normalization(), NUMBERS), NUMBERS, []
    yield "crossing", lambda x: layers.HashedCrossing(5)((x, tf.strings.length(x))), mixed, ["SparseCross"]


@pytest.mark.long
@pytest.mark.parametrize("static", [True, False])
def test_preprocessing_equals_one_process(static):
    for name, layer, data, whole in _cases():

        def step(x, layer=layer):
            found, rows = layer(x), tf.cast(tf.shape(x)[0], tf.float64)
            return found if found.dtype == tf.string else tf.cast(found, tf.float64) * rows

        simulation = Simulation(step, (data,), 3, static=static).check(data)
        assert sorted(simulation.reports[0].replicated) == whole, name
