"""A training that publishes checkpoints. Run by test_following.py: following_training.py FOLDER EPOCHS RESUME"""

import sys
import time
from pathlib import Path

import keras
import numpy as np

import keras_ddl

folder, epochs, resume = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "resume"
x = np.random.default_rng(0).random((64, 3), np.float32)

with keras_ddl.Strategy(seed=1).scope():
    model = keras.Sequential([keras.Input((3,), name="x"), keras.layers.Dense(2, name="y")])
    model.compile(keras.optimizers.SGD(0.001), "mse")


class Slow(keras.callbacks.Callback):
    """Makes steps long enough that a version can be published during training."""

    never_stops_within_epoch = True

    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.05)


keep = [
    keras_ddl.callbacks.Checkpoint(folder / "ckpt", monitor="loss", keep=1000, resume=resume),
    keras_ddl.callbacks.ExportBase(sample=x[:2]),
    keras_ddl.callbacks.Publish(folder / "served", keep=1),
]
model.fit(x, x[:, :2] + 1, batch_size=8, epochs=epochs, verbose=0, callbacks=[Slow(), *keep])
