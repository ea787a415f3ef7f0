"""A training of which ranks are killed, and which goes on. Run by test_survival.py, alone or on several ranks.

surviving_training.py MODEL DATA [WHERE RANK:WHEN[:WHERE] ...]
    MODEL: mlp, cnn, lstm, attention
    DATA: arrays, dataset, open, sequence, generator, several
    WHERE: step, between, test, epoch, never; moment (WHEN: milliseconds after the second execution has begun); recovery
        (milliseconds after this rank has begun to go on without another one)

It prints [rank at first, rank at the end, history, weights, predictions] as JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time

import keras
import numpy as np
import tensorflow as tf

import keras_ddl
from keras_ddl import communicator, ops

ROWS, BATCH, EPOCHS = 90, 20, 3
MODEL, DATA = sys.argv[1:3]
WHERE = sys.argv[3] if len(sys.argv) > 3 else "never"
KILLED = {
    int(rank): (int(when), (*where, WHERE)[0]) for rank, when, *where in (each.split(":") for each in sys.argv[4:])
}

keras.config.set_floatx("float64")
tf.config.threading.set_intra_op_parallelism_threads(1)
strategy = keras_ddl.Strategy(seed=3) if "KERAS_DDL_RUN_DIR" in os.environ else None
keras.utils.set_random_seed(3)
ME = strategy.rank if strategy is not None else 0
rng = np.random.default_rng(0)
x = rng.normal(size=(ROWS, 8, 6))
y = np.tanh(x).mean((1, 2), keepdims=True)[:, 0]
layers = keras.layers


def kill(where: str, when: int) -> None:
    if KILLED.get(ME) == (when, where):
        os.kill(os.getpid(), signal.SIGKILL)


def kill_later(where: str) -> None:
    when, where_killed = KILLED.get(ME, (0, "never"))
    if where_killed == where:
        threading.Timer(when / 1000, kill, [where, when]).start()


def regroup() -> object:
    kill_later("recovery")
    return plain_regroup()


plain_regroup, communicator.regroup = communicator.regroup, regroup


def built(kind: str) -> list[keras.layers.Layer]:
    if kind == "mlp":
        return [layers.Flatten(), layers.Dense(16, activation="relu"), layers.BatchNormalization()]
    if kind == "cnn":
        return [layers.Conv1D(8, 3, activation="relu"), layers.BatchNormalization(), layers.GlobalAveragePooling1D()]
    if kind == "lstm":
        return [layers.LSTM(8)]
    inputs = keras.Input((8, 6))
    seen = layers.MultiHeadAttention(2, 4, dropout=0.1, seed=5)(inputs, inputs)
    return [keras.Model(inputs, layers.LayerNormalization()(seen)), layers.Flatten()]


class Batches(keras.utils.PyDataset):
    def __len__(self) -> int:
        return -(-ROWS // BATCH)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        rows = slice(index * BATCH, (index + 1) * BATCH)
        return x[rows], y[rows]


def endless():
    while True:
        for index in range(len(Batches())):
            yield Batches()[index]


def data() -> dict[str, object]:
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(ROWS, seed=5).batch(BATCH)
    if DATA == "dataset":
        return {"x": dataset}
    if DATA == "open":  # its length is not known: the first epoch ends when the data does
        return {"x": dataset.filter(lambda rows, _: tf.shape(rows)[0] > 0)}
    if DATA == "sequence":
        return {"x": Batches()}
    if DATA == "generator":
        return {"x": endless(), "steps_per_epoch": 4}
    return {"x": x, "y": y, "batch_size": BATCH}


class Kills(keras.callbacks.Callback):
    has_begun = False

    def on_train_batch_begin(self, batch, logs=None):
        steps = int(model.optimizer.iterations.numpy())
        kill("between", steps)
        if steps > 0 and not self.has_begun:
            self.has_begun = True
            kill_later("moment")
        threading.Timer(0.01 * rng.random(), kill, ["step", steps]).start()  # at some moment of the step

    def on_test_batch_begin(self, batch, logs=None):
        kill("test", int(model.optimizer.iterations.numpy()))

    def on_predict_batch_begin(self, batch, logs=None):
        if KILLED.get(ME, (0, "never"))[1] in ("moment", "recovery"):
            time.sleep(30)  # the moment is yet to come

    def on_epoch_end(self, epoch, logs=None):
        kill("epoch", epoch)


with strategy.scope() if strategy is not None else contextlib.nullcontext():
    model = keras.Sequential([keras.Input((8, 6)), *built(MODEL), layers.Dropout(0.2, seed=4), layers.Dense(1)])
    model.compile(
        keras.optimizers.AdamW(0.01, global_clipnorm=1.0),
        "mse",
        metrics=["mae"],
        steps_per_execution=2 if DATA == "several" else 1,
        jit_compile=False,
    )
history = model.fit(
    **data(), epochs=EPOCHS, verbose=0, validation_data=(x[:30], y[:30]), validation_batch_size=12, callbacks=[Kills()]
)
predicted = model.predict(x[:25], batch_size=10, verbose=0, callbacks=[Kills()])
weights = [np.asarray(each).ravel().tolist() for each in (*model.variables, *model.optimizer.variables)]
if strategy is not None and strategy.size > 1:
    seen = communicator.all_gather_object(repr(weights))
    assert all(each == seen[0] for each in seen), "the ranks' weights are not the same"
    assert float(ops.all_reduce(tf.ones([]))) == strategy.size
rank = strategy.rank if strategy is not None else 0
print(json.dumps([ME, rank, history.history, weights, predicted.ravel().tolist()]), flush=True)
