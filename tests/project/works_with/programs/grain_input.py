"""Trains from a grain pipeline: shuffled, repeated by epochs, transformed, batched with a short last batch."""

import grain
import keras
import numpy as np

import keras_ddl

keras.utils.set_random_seed(1)
rng = np.random.default_rng(0)
x = rng.normal(size=(50, 8))
y = x.sum(axis=1, keepdims=True)

rows = grain.MapDataset.source(list(zip(x, y))).seed(5).shuffle().map(lambda row: (row[0] * 2.0, row[1]))
batches = rows.batch(16, drop_remainder=False).to_iter_dataset()

strategy = keras_ddl.Strategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)])
    model.compile("adam", "mse", metrics=["mae"])
history = model.fit(batches, epochs=3, verbose=2)
