"""A training that saves checkpoints and goes on from them, on a mesh with a model axis of two. Run by test_mesh.py.

mesh_training.py FOLDER EPOCHS [RANK:STEP]
    RANK is killed before it makes STEP
"""

import os
import signal
import sys
from pathlib import Path

import keras
import numpy as np

import keras_ddl

folder, epochs = Path(sys.argv[1]), int(sys.argv[2])
size = keras_ddl.init().size
layout_map = keras.distribution.LayoutMap(keras_ddl.device_mesh((max(size // 2, 1), min(size, 2))))
layout_map[".*wide/kernel"] = (None, "model")
layout_map[".*wide/bias"] = ("model",)
layout_map[".*narrow/kernel"] = ("model", None)
strategy = keras_ddl.Strategy(layout_map=layout_map)
from strategy.common import X, Y, set_precision  # noqa: E402  (which makes another Strategy)

set_precision("float64")
keras.utils.set_random_seed(11)
with strategy.scope():
    hidden = keras.layers.Dense(8, activation="tanh", name="wide")
    model = keras.Sequential([keras.Input((6,)), hidden, keras.layers.Dense(2, name="narrow")])
    model.compile(keras.optimizers.Adam(1e-2, weight_decay=0.1), "mse", jit_compile=False)
callback = keras_ddl.callbacks.Checkpoint(folder / "saved", resume=True, save_freq=4, save_best=False)
KILLED = [int(each) for each in sys.argv[3].split(":")] if len(sys.argv) > 3 else [-1, -1]
RANK = strategy.rank


def kill(batch: int, logs: object = None) -> None:
    if [RANK, int(model.optimizer.iterations.numpy())] == KILLED:
        os.kill(os.getpid(), signal.SIGKILL)


killing = keras.callbacks.LambdaCallback(on_train_batch_begin=kill)
model.fit(X, Y, batch_size=10, epochs=epochs, shuffle=False, verbose=0, callbacks=[callback, killing])
with strategy.whole_model(model):
    found = [each.numpy() for each in [*model.variables, *model.optimizer.variables]]
if strategy.rank == 0:
    np.savez(folder / f"{size}_{epochs}.npz", *found)
