"""A training that saves checkpoints and goes on from them, its optimizer in shards or not. Run by test_shards.py.

sharded_training.py FOLDER EPOCHS KIND [VICTIM]   KIND: what is in shards: "sharded" the optimizer, "weights" also the
                                                  weights, "whole" nothing
                                                  VICTIM: the rank killed as it writes its second checkpoint
"""

import os
import signal
import sys
from pathlib import Path

import keras
import numpy as np

import keras_ddl
from keras_ddl.checkpoint.snapshot import Snapshot
from keras_ddl.strategy.shards import gathered_slots

folder, epochs, kind = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
strategy = keras_ddl.Strategy(sharding={"sharded": "optimizer", "weights": "weights", "whole": None}[kind])
from strategy.common import X, Y, dense_model, set_precision  # noqa: E402  (which makes another Strategy)

is_victim = sys.argv[4:] == [str(strategy.rank)]  # by the rank that it begins with
write_bundles, written = Snapshot.write_bundles, []


def write_or_die(self, folder, writer=None):
    if len(written) == 1 and is_victim:
        os.kill(os.getpid(), signal.SIGKILL)
    written.append(folder)
    return write_bundles(self, folder, writer)


Snapshot.write_bundles = write_or_die
set_precision("float64")
keras.utils.set_random_seed(11)
with strategy.scope():
    model = dense_model()
    model.compile(keras.optimizers.Adam(1e-2, weight_decay=0.1), "mse", jit_compile=False)
callback = keras_ddl.callbacks.Checkpoint(
    folder / "saved", resume=True, save_freq=4, export_base=False, save_best=False
)
model.fit(X, Y, batch_size=10, epochs=epochs, shuffle=False, verbose=0, callbacks=[callback])
assert bool(gathered_slots.slots_of(model)) == (kind != "whole" and strategy.size > 1)
with strategy.whole_model(model):
    found = [*model.get_weights(), *(each.numpy() for each in model.optimizer.variables)]
assert strategy.size == 1 or kind == "whole" or written  # each rank wrote its own
if strategy.rank == 0:
    np.savez(folder / f"{kind}_{strategy.size}_{epochs}.npz", *found)
