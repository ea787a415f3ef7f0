"""Logs a training to Weights & Biases, offline: metrics, a custom number, the best model as an artifact."""

import keras
import numpy as np
import wandb
from wandb.integration.keras import WandbMetricsLogger, WandbModelCheckpoint

import keras_ddl

keras.utils.set_random_seed(1)
rng = np.random.default_rng(0)
x = rng.normal(size=(50, 8))
y = x.sum(axis=1, keepdims=True)

run = wandb.init(project="sums", mode="offline", config={"units": 8, "rate": 1e-2})
strategy = keras_ddl.Strategy()
with strategy.scope():
    model = keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(run.config.units, activation="tanh"), keras.layers.Dense(1)]
    )
    model.compile(keras.optimizers.Adam(wandb.config["rate"]), "mse", metrics=["mae"])
history = model.fit(
    x,
    y,
    batch_size=16,
    epochs=3,
    verbose=2,
    validation_split=0.2,
    callbacks=[WandbMetricsLogger(log_freq=2), WandbModelCheckpoint("best.keras", save_best_only=True)],
)
wandb.log({"rows": len(x)})
wandb.finish()
