"""Losses that are means, sums or ratios over the batch, and losses that compare rows."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from _scoreboard.peers import Peer
from _scoreboard.programs.common import (
    BATCH,
    LABELS,
    ROWS,
    SEQUENCES,
    TOKENS,
    Values,
    X,
    dense,
    layers,
    ops,
    program,
    train,
)

CROSSENTROPY = "sparse_categorical_crossentropy"


def classifier() -> keras.Model:
    return dense(outputs=3, activation="softmax")


@program("mean squared error")
def plain(peer: Peer) -> Values:
    return train(peer, metrics=lambda: ["mae"])


@program("a loss with reduction='sum'")
def sum_loss(peer: Peer) -> Values:
    loss = keras.losses.MeanSquaredError(reduction="sum")
    return train(peer, loss=loss, compiled={"loss_weights": peer.sum_loss_factor})


@program("class_weight")
def class_weights(peer: Peer) -> Values:
    return train(peer, classifier, y=LABELS, loss=CROSSENTROPY, class_weight={0: 1.0, 1: 3.0, 2: 0.5})


@program("sample_weight")
def sample_weights(peer: Peer) -> Values:
    return train(peer, sample_weight=np.linspace(0.1, 2.0, ROWS))


@program("sample_weight, divided by the sum of the weights")
def weighted_mean(peer: Peer) -> Values:
    loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    return train(peer, loss=loss, sample_weight=np.linspace(0.1, 2.0, ROWS))


@program("a loss over tokens, padding masked")
def masked_tokens(peer: Peer) -> Values:
    def build() -> keras.Model:
        inputs = keras.Input((5,), dtype="int32")
        hidden = layers.Dense(6, activation="tanh")(layers.Embedding(12, 4, mask_zero=True)(inputs))
        return keras.Model(inputs, layers.Dense(12, activation="softmax")(hidden))

    return train(peer, build, TOKENS, TOKENS, loss=CROSSENTROPY)


@program("supervised contrastive loss: every row with all others")
def contrastive(peer: Peer) -> Values:
    def loss(y: Any, predicted: Any) -> Any:
        unit = ops.normalize(predicted, axis=1)
        others = 1.0 - ops.eye(ops.shape(unit)[0], dtype=unit.dtype)
        similarity = 5.0 * ops.matmul(unit, ops.transpose(unit))
        classes = ops.reshape(y, (-1, 1))
        same = others * ops.cast(ops.equal(classes, ops.transpose(classes)), unit.dtype)
        log_probability = similarity - ops.log(ops.sum(ops.exp(similarity) * others, axis=1, keepdims=True))
        return -ops.sum(same * log_probability, axis=1) / ops.maximum(ops.sum(same, axis=1), 1.0)

    return train(peer, y=LABELS, loss=loss)


@program("Dice loss: ratios of sums over the batch, by class")
def dice(peer: Peer) -> Values:
    def loss(y: Any, predicted: Any) -> Any:
        by_class = ops.sum(y * predicted, axis=0) / (ops.sum(y, axis=0) + ops.sum(predicted, axis=0))
        return peer.scaled(1.0 - 2.0 * ops.mean(by_class))

    targets = (np.arange(3) == LABELS[:, None]).astype("float64")
    return train(peer, classifier, y=targets, loss=loss)


@program("1 - correlation over the batch")
def correlation(peer: Peer) -> Values:
    def loss(y: Any, predicted: Any) -> Any:
        y, predicted = y - ops.mean(y), predicted - ops.mean(predicted)
        ratio = ops.sum(y * predicted) / ops.sqrt(ops.sum(y**2) * ops.sum(predicted**2))
        return peer.scaled(1.0 - ratio)

    return train(peer, loss=loss)


@program("CTC", tolerance=1e-5)  # Keras computes it in float32
def ctc(peer: Peer) -> Values:
    def build() -> keras.Model:
        inputs = keras.Input((5, 3))
        return keras.Model(inputs, layers.Dense(5)(layers.LSTM(6, return_sequences=True)(inputs)))

    return train(peer, build, SEQUENCES, TOKENS[:, :2] % 4 + 1, loss=keras.losses.CTC())


@program("add_loss, an activity regularizer and L2")
def penalties(peer: Peer) -> Values:
    class Penalty(layers.Layer):
        def call(self, x: Any) -> Any:
            self.add_loss(0.1 * ops.mean(ops.square(x)))
            return x

    def build() -> keras.Model:
        between = layers.Dense(4, activity_regularizer="l2", kernel_regularizer="l2")
        return dense(between, Penalty())

    return train(peer, build)


@program("two outputs, two losses, loss_weights")
def two_outputs(peer: Peer) -> Values:
    def build() -> keras.Model:
        inputs = keras.Input((6,))
        hidden = layers.Dense(8, activation="tanh")(inputs)
        label = layers.Dense(3, activation="softmax", name="label")(hidden)
        return keras.Model(inputs, {"value": layers.Dense(1, name="value")(hidden), "label": label})

    losses = {"value": "mse", "label": CROSSENTROPY}
    weights = {"value": 0.3, "label": 1.0}
    return train(peer, build, y={"value": X[:, :1], "label": LABELS}, loss=losses, compiled={"loss_weights": weights})


assert ROWS % BATCH == 0
