"""Short batches (also in validation and prediction), ragged rows, and several steps per call."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from _scoreboard.peers import Peer
from _scoreboard.programs.common import (
    BATCH,
    ROWS,
    TOKENS,
    Values,
    X,
    Y,
    dense,
    layers,
    ops,
    program,
    sgd,
    train,
    values_of,
)


@program("a last batch of 6 rows after batches of 10")
def short_even(peer: Peer) -> Values:
    return train(peer, rows=46, metrics=lambda: ["mae"])


@program("a last batch of 3 rows")
def short_odd(peer: Peer) -> Values:
    return train(peer, rows=43, metrics=lambda: ["mae"])


@program("a last batch of one row")
def last_of_one(peer: Peer) -> Values:
    return train(peer, rows=41, metrics=lambda: ["mae"])


@program("validation_data with a last batch of 3 rows", of_logs=True)
def validation(peer: Peer) -> Values:
    return train(peer, metrics=lambda: ["mae"], validation_data=(X[5:20], Y[5:20]), validation_batch_size=6)


@program("evaluate of 43 rows in batches of 10", of_logs=True)
def evaluation(peer: Peer) -> Values:
    with peer.scope():
        model = dense()
        model.compile(sgd(), "mse", metrics=["mae"])
    logs = peer.fit(model, X[:ROWS], Y[:ROWS], batch_size=BATCH, epochs=1)
    seen = model.evaluate(X[:43], Y[:43], batch_size=BATCH, verbose=0, return_dict=True)
    return values_of(model, logs) | {f"evaluate {key}": np.asarray(value) for key, value in seen.items()}


@program("predict of 43 rows in batches of 10", of_logs=True)
def prediction(peer: Peer) -> Values:
    with peer.scope():
        model = dense()
        model.compile(sgd(), "mse")
    logs = peer.fit(model, X[:ROWS], Y[:ROWS], batch_size=BATCH, epochs=1)
    return values_of(model, logs) | {"predictions": model.predict(X[:43], batch_size=BATCH, verbose=0)}


@program("ragged rows (tf.RaggedTensor)", backends=("tensorflow",))
def ragged(peer: Peer) -> Values:
    import tensorflow as tf

    class Words(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = layers.Embedding(12, 4), layers.Dense(2)

        def call(self, words: Any) -> Any:
            return self.head(tf.reduce_mean(tf.ragged.map_flat_values(self.table, words), axis=1))

    rows = tf.ragged.constant([[word for word in row if word] for row in TOKENS[:ROWS].tolist()])
    with peer.scope():
        model = Words()
        model.compile(sgd(), "mse")
    data = tf.data.Dataset.from_tensor_slices((rows, Y[:ROWS])).batch(BATCH)
    return values_of(model, peer.fit(model, data, epochs=2))


@program("steps_per_execution=3, of 4 steps an epoch")
def several_steps(peer: Peer) -> Values:
    return train(peer, metrics=lambda: ["mae"], compiled={"steps_per_execution": 3})


@program("a mask of rows chosen by their values (boolean indexing)")
def chosen_rows(peer: Peer) -> Values:
    def loss(y: Any, predicted: Any) -> Any:
        counted = ops.cast(y[:, 0] > 0, predicted.dtype)
        errors = ops.mean(ops.square(y - predicted), axis=1)
        return peer.scaled(ops.sum(errors * counted) / ops.maximum(ops.sum(counted), 1.0))

    return train(peer, loss=loss)
