"""A custom training loop: GradientTape, tf.function and `strategy.run` instead of `fit`.

    keras-ddl run -np 2 python examples/custom_loop.py

This is tf.distribute's convention: inside `strategy.run` Keras losses are divided by the number of ranks and the
optimizer sums gradients over the ranks. `strategy.function` (docs/cut.md) gives the step of a single process instead,
even if a short last batch leaves the ranks with unequal numbers of rows.
"""

from __future__ import annotations

import argparse

import keras
import numpy as np
import tensorflow as tf
from digits import build_model, load_split

import keras_ddl


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=64, help="global, over all ranks (default: %(default)s)")
    arguments = parser.parse_args()

    strategy = keras_ddl.Strategy(seed=3)
    data = load_split()
    with strategy.scope():
        model = build_model()
        optimizer = keras.optimizers.Adam(2e-3)
        loss_of = keras.losses.SparseCategoricalCrossentropy()

    @tf.function
    def train_step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        def on_this_rank(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = loss_of(labels, model(images, training=True))
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))
            return loss

        return strategy.run(on_this_rank, args=(images, labels))

    images, labels = data["train"]
    batches = tf.data.Dataset.from_tensor_slices((images, labels))
    batches = batches.shuffle(len(images), seed=3).batch(arguments.batch_size)
    batches = strategy.experimental_distribute_dataset(batches)  # each rank gets its rows of every batch
    for epoch in range(arguments.epochs):
        # Each rank's loss is its mean divided by the number of ranks, so the sum over ranks is the mean of the means.
        shares = [train_step(*batch) for batch in batches]
        loss = strategy.reduce("SUM", tf.add_n(shares) / len(shares))
        if strategy.rank == 0:
            print(f"epoch {epoch + 1}: loss {float(loss):.4f}")

    images, labels = data["held_out"]
    accuracy = np.mean(np.argmax(model(images, training=False), axis=1) == labels)
    weights = keras_ddl.all_gather_object([w.tobytes() for w in model.get_weights()])
    if strategy.rank == 0:
        assert all(other == weights[0] for other in weights), "the ranks' weights differ"
        print(f"held-out accuracy {accuracy:.4f} on {strategy.size} rank(s), weights bitwise equal")


if __name__ == "__main__":
    main()
