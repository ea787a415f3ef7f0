"""Searches for the width and the rate of a small network with KerasTuner: tune.py RandomSearch."""

import sys

import keras
import keras_tuner
import numpy as np

import keras_ddl

rng = np.random.default_rng(0)
x = rng.normal(size=(70, 8))
y = np.sin(x.sum(axis=1, keepdims=True))
strategy = keras_ddl.Strategy()


def build(hp):
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(hp.Int("units", 4, 32, step=4), activation="tanh"),
            keras.layers.Dropout(hp.Float("dropout", 0.0, 0.4)),
            keras.layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.Adam(hp.Float("rate", 1e-3, 1e-1, sampling="log")), "mse")
    return model


options = {"max_trials": 5} if sys.argv[1] != "Hyperband" else {"max_epochs": 3}
if sys.argv[1] == "BayesianOptimization":
    options["num_initial_points"] = 3
Tuner = keras_ddl.tuner.on_all_ranks(getattr(keras_tuner, sys.argv[1]))
tuner = Tuner(build, objective="val_loss", directory="tuning", seed=1, distribution_strategy=strategy, **options)
tuner.search_space_summary()
backup = keras.callbacks.BackupAndRestore("backup")
tuner.search(x[:50], y[:50], epochs=4, batch_size=16, validation_data=(x[50:], y[50:]), callbacks=[backup], verbose=2)
tuner.results_summary()
print("best units:", tuner.get_best_hyperparameters()[0].get("units"))
model = tuner.get_best_models()[0]
print("loss of the best:", float(model.evaluate(x[50:], y[50:], verbose=0)))
