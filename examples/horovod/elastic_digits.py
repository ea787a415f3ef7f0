"""An elastic script of Horovod's Keras interface, with every line it has there: only its import names keras_ddl.

    keras-ddl run -np 2 --restarts 3 python examples/horovod/elastic_digits.py
    keras-ddl run -np 1:4 --host-discovery-script ./hosts --restarts 3 \\
        python examples/horovod/elastic_digits.py

If you kill a rank, the job is started again, and continues from the last commit.
"""

from __future__ import annotations

import argparse
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
    arguments = parser.parse_args()

    hvd.init()
    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")

    data = load_split()
    images, labels = data["train"]
    dataset = tf.data.Dataset.from_tensor_slices((images, labels))
    dataset = dataset.shuffle(2000, seed=hvd.rank()).repeat().batch(32)
    steps = len(images) // (32 * hvd.size())

    model = build_model()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.02 * hvd.size(), momentum=0.9))
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])

    def on_state_reset() -> None:
        model.optimizer.learning_rate.assign(0.02 * hvd.size())  # the commit may have another size's rate

    state = hvd.elastic.KerasState(model, batch=0, epoch=0)
    state.register_reset_callbacks([on_state_reset])
    callbacks = [
        hvd.elastic.CommitStateCallback(state, batches_per_commit=5),
        hvd.elastic.UpdateBatchStateCallback(state),
        hvd.elastic.UpdateEpochStateCallback(state),
    ]

    @hvd.elastic.run
    def train(state: hvd.elastic.KerasState) -> None:
        if hvd.rank() == 0:
            print(f"training from epoch {state.epoch}, batch {state.batch} on {hvd.size()} rank(s)", flush=True)
        verbose = 2 if hvd.rank() == 0 else 0
        epochs = arguments.epochs - state.epoch
        model.fit(dataset, steps_per_epoch=steps, epochs=epochs, callbacks=callbacks, verbose=verbose)

    train(state)

    images, labels = data["held_out"]
    accuracy = float(np.mean(np.argmax(model.predict(images, verbose=0), axis=1) == labels))
    if hvd.rank() == 0:
        print(f"held-out accuracy {accuracy:.4f} on {hvd.size()} rank(s)")


if __name__ == "__main__":
    main()
