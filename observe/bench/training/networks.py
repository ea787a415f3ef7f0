"""The networks of the training benchmarks: with little or much arithmetic per byte of gradients, dense or sparse.

Keras is imported only when a network is built, because the command line lists their names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import keras

CLASSES = 10
# A few tokens per class fill most of each row, so a network learns them in a few epochs of a thousand rows.
_TOKENS_OF_CLASS, _OWN_TOKENS = 2, 0.8


@dataclass(frozen=True)
class Network:
    """`make`: builds the model. `batch`: rows per rank. `shape`: a row's. `tokens`: number of tokens, 0 for floats."""

    make: Callable[[], keras.Model]
    batch: int
    shape: tuple[int, ...]
    tokens: int = 0

    def rows(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns random features and labels of `count` rows, the same on every rank."""
        rng = np.random.default_rng(0)
        labels = rng.integers(0, CLASSES, size=count)
        if self.tokens:
            return rng.integers(0, self.tokens, size=(count, *self.shape)).astype("int32"), labels
        return rng.normal(size=(count, *self.shape)).astype("float32"), labels

    def learnable_rows(self, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns `rows` with learnable labels: each class has its own mean, or its own tokens in most places.

        seed: different seeds give different rows of the same classes.
        """
        rng = np.random.default_rng([seed, 1])
        labels = rng.integers(0, CLASSES, size=count)
        row_labels = labels.reshape(-1, *(1 for _ in self.shape))
        if self.tokens:
            own = row_labels + CLASSES * rng.integers(0, _TOKENS_OF_CLASS, size=(count, *self.shape))
            other = rng.integers(0, self.tokens, size=own.shape)
            return np.where(rng.random(own.shape) < _OWN_TOKENS, own, other).astype("int32"), labels
        means = np.random.default_rng(2).normal(size=(CLASSES, *self.shape)).astype("float32")
        return 0.3 * means[labels] + rng.normal(size=(count, *self.shape)).astype("float32"), labels


def cnn() -> keras.Model:
    """3.3 million parameters (13 MB of gradients), mostly arithmetic."""
    import keras

    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((32, 32, 3)),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(64, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(800, activation="relu"),
            layers.Dense(CLASSES, activation="softmax"),
        ]
    )


def mlp() -> keras.Model:
    """25.2 million parameters (101 MB of gradients), little arithmetic for each."""
    import keras

    hidden = [keras.layers.Dense(2048, activation="relu") for _ in range(6)]
    return keras.Sequential([keras.Input((2048,)), *hidden, keras.layers.Dense(CLASSES, activation="softmax")])


def resnet() -> keras.Model:
    """ResNet-50: 23.6 million parameters (94 MB) in 214 tensors, most of them small."""
    import keras

    return keras.applications.ResNet50(weights=None, input_shape=(64, 64, 3), classes=CLASSES)


def lstm() -> keras.Model:
    """An embedding of 32,000 x 256, whose gradient is tf.IndexedSlices, and an LSTM."""
    import keras

    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((64,), dtype="int32"),
            layers.Embedding(32_000, 256),
            layers.LSTM(256),
            layers.Dense(CLASSES, activation="softmax"),
        ]
    )


NETWORKS = {
    "cnn": Network(cnn, 64, (32, 32, 3)),
    "mlp": Network(mlp, 32, (2048,)),
    "resnet": Network(resnet, 4, (64, 64, 3)),
    "lstm": Network(lstm, 16, (64,), tokens=32_000),
}
