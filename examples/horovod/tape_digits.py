"""A training loop for Horovod's TensorFlow interface, unchanged except for the import, which names keras_ddl.

    keras-ddl run -np 2 python examples/horovod/tape_digits.py

Each rank trains on its own share of the digits; the tape averages gradients.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import keras_ddl.horovod as hvd  # was: import horovod.tensorflow as hvd

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from digits import build_model, load_split


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=320, help="of all ranks together (default: %(default)s)")
    arguments = parser.parse_args()

    hvd.init()
    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")

    data = load_split()
    dataset = tf.data.Dataset.from_tensor_slices(data["train"])
    dataset = dataset.shard(hvd.size(), hvd.rank()).repeat().shuffle(1000).batch(32)

    model = build_model()
    loss_of = keras.losses.SparseCategoricalCrossentropy()
    optimizer = keras.optimizers.Adam(0.001 * hvd.size())

    @tf.function
    def training_step(images: tf.Tensor, labels: tf.Tensor, first_batch: bool) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images, training=True))
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        # Broadcast after the first step, because all variables exist only then.
        if first_batch:
            hvd.broadcast_variables(model.variables, root_rank=0)
            hvd.broadcast_variables(optimizer.variables, root_rank=0)
        return loss

    for batch, (images, labels) in enumerate(dataset.take(arguments.steps // hvd.size())):
        loss = training_step(images, labels, batch == 0)
        if batch % 40 == 0 and hvd.rank() == 0:
            print(f"step {batch}: loss {float(loss):.4f}")

    images, labels = data["held_out"]
    accuracy = np.mean(np.argmax(model(images, training=False), axis=1) == labels)
    if hvd.rank() == 0:
        model.save("tape_digits.keras")
        print(f"held-out accuracy {accuracy:.4f} on {hvd.size()} rank(s)")


if __name__ == "__main__":
    main()
