"""Contrastive learning of two views of each image, with a loss that compares every row of the batch with every other.

    keras-ddl run -np 2 python examples/contrastive.py

The step is written for the whole batch, and every rank computes its own rows. The codes of the second views are
gathered, because all rows are compared with them (SimCLR: Chen et al., arXiv 2002.05709); `--explain-step` shows this.
The two views are random, and the same on any number of ranks.
"""

from __future__ import annotations

import argparse

import keras
import numpy as np
import tensorflow as tf
from digits import load_split
from keras import ops

import keras_ddl


class Contrastive(keras.Model):
    """Pulls the codes of two views of an image together, and pushes them away from other images' codes in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = keras.Sequential(
            [keras.layers.Flatten(), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(16)]
        )
        self.view = keras.Sequential([keras.layers.RandomTranslation(0.1, 0.1), keras.layers.GaussianNoise(0.1)])

    def call(self, images: tf.Tensor) -> tf.Tensor:
        return ops.normalize(self.encoder(images), axis=1)

    def train_step(self, images: tf.Tensor) -> dict[str, tf.Tensor]:
        one, other = self.view(images, training=True), self.view(images, training=True)
        with tf.GradientTape() as tape:
            codes, others = self(one), self(other)
            logits = ops.matmul(codes, ops.transpose(others)) / 0.2
            own = tf.range(tf.shape(codes, tf.int64)[0])
            loss = ops.mean(keras.losses.sparse_categorical_crossentropy(own, logits, from_logits=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        found = ops.mean(ops.cast(tf.argmax(logits, axis=1) == own, "float32"))
        return {"loss": loss, "found": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64, help="global, over all ranks (default: %(default)s)")
    arguments = parser.parse_args()

    strategy = keras_ddl.Strategy(seed=3)
    images, _ = load_split()["train"]
    with strategy.scope():
        model = Contrastive()
        model.compile(keras.optimizers.Adam(2e-3))
    history = model.fit(images, batch_size=arguments.batch_size, epochs=arguments.epochs, verbose=0).history
    weights = keras_ddl.all_gather_object([w.tobytes() for w in model.get_weights()])
    if strategy.rank == 0:
        assert all(other == weights[0] for other in weights), "the ranks' weights differ"
        print(
            f"loss {history['loss'][0]:.3f} -> {history['loss'][-1]:.3f}; of {arguments.batch_size} images in a batch"
        )
        print(f"the other view is found for {np.mean(history['found'][-3:]):.0%} on {strategy.size} rank(s)")


if __name__ == "__main__":
    main()
