"""A training that is killed at random moments and restarted until it finishes. Run by test_callbacks.py.

killed_training.py FOLDER KILLS EPOCHS   kills the first KILLS attempts under `keras-ddl run --restarts`; the next one
    trains to the end, and then once more without interruption in another folder
"""

import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np

import keras_ddl
from keras_ddl import checkpoint as ckpt
from keras_ddl import config
from keras_ddl.files import durable
from strategy.common import RANK, SIZE, STRATEGY, X, Y, check_equal_on_all_ranks, keras

SAVE_FREQ = 3


def die():
    os.kill(os.getpid(), signal.SIGKILL)


class Kill(keras.callbacks.Callback):
    """Kills a random rank at a random moment after one of the next few steps."""

    never_stops_within_epoch = True

    def __init__(self, generator, done):
        super().__init__()
        self.at = done + generator.randint(1, 5)
        self.seconds = generator.uniform(0.0, 0.03)
        self.victim = generator.randrange(SIZE)

    def on_train_batch_end(self, batch, logs=None):
        if self.model.optimizer.iterations == self.at and self.victim == RANK:
            threading.Timer(self.seconds, die).start()


class Record(keras.callbacks.Callback):
    """Writes each epoch's logs to a file, and makes a step last as long as a write."""

    never_stops_within_epoch = True

    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.01)

    def on_epoch_end(self, epoch, logs=None):
        if RANK == 0:
            path = self.folder / f"epoch-{epoch}.json"
            path.with_suffix(".part").write_text(json.dumps(logs))
            path.with_suffix(".part").rename(path)


def kill_while_the_second_checkpoint_takes_its_name():
    publish, calls = durable.publish, []

    def publish_or_die(staged, final, *, replace):
        calls.append(final)
        if len(calls) == 2:
            die()
        publish(staged, final, replace=replace)

    durable.publish = publish_or_die


def make_model():
    keras.utils.set_random_seed(3)
    with STRATEGY.scope():
        hidden = [
            keras.layers.Dense(8, activation="tanh"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.2),
        ]
        model = keras.Sequential([keras.Input((6,)), *hidden, keras.layers.Dense(2)])
        model.compile(keras.optimizers.Adam(0.02), "mse", metrics=["mae"])
    return model


def train(folder, epochs, *parts):
    folder.mkdir(exist_ok=True)
    keep = keras_ddl.callbacks.Checkpoint(
        folder / "ckpt", monitor="loss", export_base=False, save_freq=SAVE_FREQ, resume=True
    )
    parts = [
        keras_ddl.callbacks.LearningRateWarmup(warmup_epochs=2, scaling=2.0),
        keras.callbacks.ReduceLROnPlateau(monitor="val_loss", patience=1, min_delta=0.05, factor=0.9),
        Record(folder),
        keep,
        *parts,
    ]
    model = make_model()
    history = model.fit(X, Y, batch_size=8, epochs=epochs, validation_split=0.25, verbose=0, callbacks=parts).history
    check_equal_on_all_ranks(model, history)
    if RANK == 0:
        np.savez(folder / "end.npz", *[v.numpy() for v in [*model.variables, *model.optimizer.variables]])


def main():
    folder, kills, epochs = Path(sys.argv[1]), *map(int, sys.argv[2:])
    number = config.get("RESTART")
    if number >= kills:
        train(folder / "killed", epochs)
        train(folder / "whole", epochs)
        return
    found = ckpt.list_checkpoints(folder / "killed" / "ckpt") if (folder / "killed" / "ckpt").exists() else []
    if number == 1:  # before the first kill there was one whole checkpoint, of step 3
        assert [each.step for each in found] == [SAVE_FREQ], found
    done = keras_ddl.broadcast_object(found[-1].step if found else 0, name="test/done")
    if number == 0 and RANK == 0:
        kill_while_the_second_checkpoint_takes_its_name()
    train(folder / "killed", epochs, *([Kill(random.Random(f"11 {number}"), done)] if number else []))


main()
