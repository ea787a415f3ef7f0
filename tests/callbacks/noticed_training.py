"""A training that a signal warns of its end, and that is then restarted. Run by test_notice.py.

noticed_training.py FOLDER SIGNAL RANK STEP   rank RANK sends SIGNAL to itself in step STEP of the first attempt;
    "none": trains to the end without interruption
"""

import os
import signal
import sys
from pathlib import Path

import numpy as np

import keras_ddl
from keras_ddl import config
from strategy.common import RANK, STRATEGY, X, Y, check_equal_on_all_ranks, keras

folder, name, victim, step = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
SIGNALS = ("SIGTERM", "SIGUSR1")


class SignalTo(keras.callbacks.Callback):
    """Sends the signal during a step, or marks that the test may send it from outside."""

    never_stops_within_epoch = True

    def on_train_batch_begin(self, batch, logs=None):
        if config.get("RESTART") == 0 and self.model.optimizer.iterations == step:
            (folder / f"up-{RANK}").touch()
            if victim == RANK:
                os.kill(os.getpid(), getattr(signal, name))


keras.utils.set_random_seed(3)
with STRATEGY.scope():
    layers = [keras.Input((6,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dropout(0.2)]
    model = keras.Sequential([*layers, keras.layers.Dense(2)])
    model.compile(keras.optimizers.Adam(0.02), "mse", metrics=["mae"])
keep = keras_ddl.callbacks.Checkpoint(
    folder / "ckpt", monitor="loss", export_base=False, resume=True, on_signal=() if name == "none" else SIGNALS
)
parts = [keep] if name == "none" else [SignalTo(), keep]
history = model.fit(X, Y, batch_size=8, epochs=4, validation_split=0.25, verbose=0, callbacks=parts).history
check_equal_on_all_ranks(model, history)
if RANK == 0:
    np.savez(folder / "end.npz", *[v.numpy() for v in [*model.variables, *model.optimizer.variables]])
