"""Fits of two models, of which the second begins when one rank is left, and a spare joins it there. Run by
test_joining.py, alone or on two ranks.

training_alone.py plain|shards ...

It prints [rank at first, rank at the end, history, weights, predictions] as JSON, as surviving_training.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import keras_ddl

keras.config.set_floatx("float64")
tf.config.threading.set_intra_op_parallelism_threads(1)
os.environ["KERAS_DDL_SHARD_FROM_ELEMENTS"] = "10"
IS_JOB = "KERAS_DDL_RUN_DIR" in os.environ
ME = int(os.environ.get("OMPI_COMM_WORLD_RANK", 0))  # as the launcher counts
strategy = keras_ddl.Strategy(seed=3, shard_optimizer=sys.argv[1] == "shards") if IS_JOB else None
keras.utils.set_random_seed(3)
rng = np.random.default_rng(0)
x = rng.normal(size=(90, 6))
y = np.tanh(x).mean(1, keepdims=True)
arrays = {"x": x, "y": y, "batch_size": 20, "verbose": 0}
layers = keras.layers


class Kill(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        if ME == 1 and batch == 2:
            os.kill(os.getpid(), signal.SIGKILL)


class Wait(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if strategy is not None and strategy.size == 1:
            time.sleep(1)


def made() -> keras.Model:
    with strategy.scope() if strategy is not None else contextlib.nullcontext():
        model = keras.Sequential([keras.Input((6,)), layers.Dense(16), layers.Dropout(0.2, seed=4), layers.Dense(1)])
        model.compile(keras.optimizers.AdamW(0.01), "mse", metrics=["mae"])
    return model


one = made()
while ME == 2 and not Path("alone").exists():  # before, it would join the first fit
    time.sleep(0.1)
first = one.fit(**arrays, epochs=1, callbacks=[Kill()])
first.history["evaluated"] = one.evaluate(x, y, batch_size=30, verbose=0)
with strategy.whole_optimizer(one) if strategy is not None else contextlib.nullcontext():
    sums = [float(np.abs(np.asarray(each)).sum()) for each in one.optimizer.variables if "dense_kernel" in each.path]
first.history["sums"] = sums if sys.argv[1] == "shards" else []  # others a spare does not have yet
two = made()
if IS_JOB:
    Path("alone").touch()
second = two.fit(**arrays, epochs=int(os.environ["EPOCHS"]), validation_data=(x[:30], y[:30]), callbacks=[Wait()])
second.history["sums"] = [float(np.abs(each).sum()) for each in one.get_weights()]  # no step has used them since
predicted = one.predict(x, batch_size=40, verbose=0)
third = one.fit(**arrays, epochs=2)
seen = {f"{name} {n}": each for n, of in enumerate([first, second, third]) for name, each in of.history.items()}
weights = []
for model in (one, two):
    with strategy.whole_optimizer(model) if strategy is not None else contextlib.nullcontext():
        weights += [np.asarray(each).ravel().tolist() for each in [*model.variables, *model.optimizer.variables]]
assert strategy is None or strategy.size == 2
rank = 0 if strategy is None else strategy.rank
print(json.dumps([ME, rank, seen, weights, predicted.ravel().tolist()]), flush=True)
