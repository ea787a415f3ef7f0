"""Writes curves, histograms, the graph and a profile of two steps for TensorBoard."""

import keras
import numpy as np

import keras_ddl

keras.utils.set_random_seed(1)
rng = np.random.default_rng(0)
x = rng.normal(size=(50, 8))
y = x.sum(axis=1, keepdims=True)

strategy = keras_ddl.Strategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)])
    model.compile("adam", "mse", metrics=["mae"])
board = keras.callbacks.TensorBoard("logs", histogram_freq=1, update_freq=2, profile_batch=(2, 4))
history = model.fit(x, y, batch_size=16, epochs=3, verbose=2, validation_split=0.2, callbacks=[board])
