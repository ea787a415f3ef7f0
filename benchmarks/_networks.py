"""The networks of the training benchmarks: little and much arithmetic for each byte of gradients, dense and sparse."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import keras
import numpy as np

layers = keras.layers


@dataclass(frozen=True)
class Network:
    """`make` builds the model; `batch` is one rank's rows; `shape` is that of a row (of token numbers if `tokens`).

    `horovod_ms` is the overhead of Horovod 0.28.1 on TensorFlow 2.15 and Keras 2 at 2 ranks, one core each, recorded
    once on a machine like the one of docs/appendix/performance.md: Horovod does not run on this TensorFlow and Keras.
    """

    make: Callable[[], keras.Model]
    batch: int
    shape: tuple[int, ...]
    horovod_ms: float
    tokens: int = 0

    def rows(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Features and labels of `count` rows, the same on every rank."""
        rng = np.random.default_rng(0)
        labels = rng.integers(0, 10, size=count)
        if self.tokens:
            return rng.integers(0, self.tokens, size=(count, *self.shape)).astype("int32"), labels
        return rng.normal(size=(count, *self.shape)).astype("float32"), labels


def cnn() -> keras.Model:
    """3.3 million parameters (13 MB of gradients), mostly arithmetic."""
    return keras.Sequential(
        [
            keras.Input((32, 32, 3)),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(64, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(800, activation="relu"),
            layers.Dense(10, activation="softmax"),
        ]
    )


def mlp() -> keras.Model:
    """25.2 million parameters (101 MB of gradients), little arithmetic for each."""
    hidden = [layers.Dense(2048, activation="relu") for _ in range(6)]
    return keras.Sequential([keras.Input((2048,)), *hidden, layers.Dense(10, activation="softmax")])


def resnet() -> keras.Model:
    """ResNet-50: 23.6 million parameters (94 MB) in 214 tensors, most of them small."""
    return keras.applications.ResNet50(weights=None, input_shape=(64, 64, 3), classes=10)


def lstm() -> keras.Model:
    """An embedding of 32,000 x 256, whose gradient is tf.IndexedSlices, and an LSTM."""
    return keras.Sequential(
        [
            keras.Input((64,), dtype="int32"),
            layers.Embedding(32_000, 256),
            layers.LSTM(256),
            layers.Dense(10, activation="softmax"),
        ]
    )


NETWORKS = {
    "cnn": Network(cnn, 64, (32, 32, 3), 6.3),
    "mlp": Network(mlp, 32, (2048,), 52.0),
    "resnet": Network(resnet, 4, (64, 64, 3), 63.0),
    "lstm": Network(lstm, 16, (64,), 25.0, tokens=32_000),
}
