"""A script for Horovod's Keras interface, unchanged except for the import, which names keras_ddl.

    keras-ddl run -np 2 python examples/horovod/keras_digits.py

Each rank trains on its own share of the digits; the optimizer averages gradients.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import keras_ddl.horovod.keras as hvd  # was: import horovod.tensorflow.keras as hvd

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from digits import build_model, load_split


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--output-dir", type=Path, default=Path("horovod-keras-output"))
    arguments = parser.parse_args()

    hvd.init()
    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")

    data = load_split()
    images, labels = data["train"]
    dataset = tf.data.Dataset.from_tensor_slices((images, labels))
    dataset = dataset.shard(hvd.size(), hvd.rank()).repeat().shuffle(1000).batch(32)
    steps = len(images) // (32 * hvd.size())

    model = build_model()
    rate = 0.02 * hvd.size()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(rate, momentum=0.9))
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])

    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(initial_lr=rate, warmup_epochs=2, verbose=1),
    ]
    if hvd.rank() == 0:
        arguments.output_dir.mkdir(parents=True, exist_ok=True)
        callbacks.append(keras.callbacks.ModelCheckpoint(os.fspath(arguments.output_dir / "checkpoint-{epoch}.keras")))

    verbose = 2 if hvd.rank() == 0 else 0
    model.fit(dataset, steps_per_epoch=steps, epochs=arguments.epochs, callbacks=callbacks, verbose=verbose)

    images, labels = data["held_out"]
    accuracy = float(np.mean(np.argmax(model.predict(images, verbose=0), axis=1) == labels))
    if hvd.rank() == 0:
        print(f"held-out accuracy {accuracy:.4f} on {hvd.size()} rank(s)")


if __name__ == "__main__":
    main()
