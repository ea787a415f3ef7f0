"""A training that is killed, resumed and compared. Run by test_callbacks.py, once for each argument.

killed_training.py FOLDER sgd-in-epoch      trains with SGD; rank 1 is killed by SIGKILL in the third epoch
killed_training.py FOLDER adam-in-writing   trains with Adam; rank 0 is killed when its third checkpoint is about to
                                            take its name
killed_training.py FOLDER resume            resumes both, trains both anew without a stop, and compares
"""

import os
import signal
import sys
from pathlib import Path

import numpy as np

import keras_ddl
from keras_ddl import checkpoint as ckpt
from keras_ddl.checkpoint import durable
from strategy.common import RANK, STRATEGY, X, Y, check_equal_on_all_ranks, keras

OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.02, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.01),
}


class KillInThirdEpoch(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if RANK == 1 and self.model.optimizer.iterations == 2 * 5 + 3:
            os.kill(os.getpid(), signal.SIGKILL)


def kill_in_third_publish():
    publish, calls = durable.publish, []

    def publish_or_die(staged, final, *, replace):
        calls.append(final)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        publish(staged, final, replace=replace)

    durable.publish = publish_or_die


def train(name, *parts):
    keras.utils.set_random_seed(3)
    with STRATEGY.scope():
        layers = [keras.Input((6,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dropout(0.2)]
        model = keras.Sequential([*layers, keras.layers.Dense(2)], name=name)
        model.compile(OPTIMIZERS[name](), "mse")
    warmup = keras_ddl.callbacks.LearningRateWarmup(warmup_epochs=4)
    history = model.fit(X, Y, batch_size=10, epochs=5, shuffle=False, verbose=0, callbacks=[warmup, *parts])
    return model, history.history


def checkpointing(folder, name, **options):
    return keras_ddl.callbacks.Checkpoint(folder / name, monitor="loss", export_base=False, **options)


def main():
    folder, what = Path(sys.argv[1]), sys.argv[2]
    if what == "sgd-in-epoch":
        train("sgd", checkpointing(folder, "sgd"), KillInThirdEpoch())
    elif what == "adam-in-writing":
        if RANK == 0:
            kill_in_third_publish()
        train("adam", checkpointing(folder, "adam"))
    else:
        for name in OPTIMIZERS:
            if RANK == 0:
                assert [each.step for each in ckpt.list_checkpoints(folder / name)] == [5, 10]
                left = [entry.name for entry in (folder / name).iterdir() if entry.name.startswith(".tmp-")]
                assert len(left) == (name == "adam"), left
            resumed, history = train(name, checkpointing(folder, name, resume=True))
            whole, expected = train(name)
            assert history["loss"] == expected["loss"][2:], (history, expected)
            for mine, one in zip(resumed.get_weights(), whole.get_weights()):
                np.testing.assert_array_equal(mine, one)
            check_equal_on_all_ranks(resumed, history)
            if RANK == 0:
                assert not [entry for entry in (folder / name).iterdir() if entry.name.startswith(".tmp-")]
        print("compared")


main()
