"""Logs a training to MLflow by mlflow.autolog() alone."""

import keras
import mlflow
import numpy as np

import keras_ddl

keras.utils.set_random_seed(1)
mlflow.autolog()
rng = np.random.default_rng(0)
x = rng.normal(size=(50, 8))
y = x.sum(axis=1, keepdims=True)

strategy = keras_ddl.Strategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)])
    model.compile("adam", "mse", metrics=["mae"])
history = model.fit(x, y, batch_size=16, epochs=3, verbose=2)
