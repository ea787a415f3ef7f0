"""A training on a mesh that saves checkpoints and resumes from them. Run by test_mesh.py.

mesh_training.py FOLDER EPOCHS MODEL_RANKS [VICTIM MOMENT]
  MODEL_RANKS: ranks along the model axis; "2+shards" also shards the optimizer over the data ranks
"""

import os
import signal
import sys
from pathlib import Path

import keras
import numpy as np

import keras_ddl
from keras_ddl.callbacks import _in_parts
from keras_ddl.checkpoint.snapshot import Snapshot
from keras_ddl.files import durable

folder, epochs, (model_ranks, _, shards) = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3].partition("+")
size = keras_ddl.init().size
layout_map = keras.distribution.LayoutMap(keras_ddl.device_mesh((size // int(model_ranks), int(model_ranks))))
layout_map[".*wide/kernel"] = (None, "model")
layout_map[".*wide/bias"] = ("model",)
layout_map[".*narrow/kernel"] = ("model", None)
strategy = keras_ddl.Strategy(layout=layout_map, sharding="optimizer" if shards else None)
from strategy.common import X, Y, set_precision  # noqa: E402  (the import creates another Strategy)


def die_in(owner, function, moment):
    """Kills this process in the second call of a function: at its beginning or at its end."""
    original, calls = getattr(owner, function), []

    def call(*args, **kwargs):
        calls.append(function)
        if len(calls) == 2 and moment == "begin":
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*args, **kwargs)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, function, call)


MOMENTS = {
    "writes its part": (Snapshot, "write_bundles", "begin"),
    "has written its part": (Snapshot, "write_bundles", "end"),
    "merges": (_in_parts, "merge_bundles", "begin"),
    "has merged": (_in_parts, "merge_bundles", "end"),
    "publishes": (durable, "publish", "begin"),
    "has published": (durable, "publish", "end"),
}
is_victim = len(sys.argv) > 4 and int(sys.argv[4]) == strategy.rank
if is_victim and sys.argv[5] in MOMENTS:
    die_in(*MOMENTS[sys.argv[5]])


class Kill(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        if is_victim and str(int(model.optimizer.iterations.numpy())) == sys.argv[5]:
            os.kill(os.getpid(), signal.SIGKILL)


set_precision("float64")
keras.utils.set_random_seed(11)
with strategy.scope():
    hidden = keras.layers.Dense(8, activation="tanh", name="wide")
    model = keras.Sequential([keras.Input((6,)), hidden, keras.layers.Dense(2, name="narrow")])
    model.compile(keras.optimizers.Adam(1e-2, weight_decay=0.1), "mse", jit_compile=False)
callback = keras_ddl.callbacks.Checkpoint(folder / "saved", resume=True, save_freq=2, save_best=False, keep=99)
model.fit(X, Y, batch_size=10, epochs=epochs, shuffle=False, verbose=0, callbacks=[callback, Kill()])
with strategy.whole_model(model):
    found = [each.numpy() for each in [*model.variables, *model.optimizer.variables]]
if strategy.rank == 0:
    np.savez(folder / f"{size}_{epochs}.npz", *found)
