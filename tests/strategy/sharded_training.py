"""A training, with or without shards, that saves checkpoints and resumes from them. Run by test_shards.py.

sharded_training.py FOLDER EPOCHS KIND [VICTIM]
    KIND: "sharded" shards the optimizer, "weights" also the weights, "whole" nothing; "tables" and "whole tables" train
        a model with two tables, the first of which is looked up twice
    VICTIM: the rank to kill as it writes its second checkpoint
"""

import os
import signal
import sys
from pathlib import Path

import keras
import numpy as np

import keras_ddl
from keras_ddl.checkpoint.snapshot import Snapshot
from keras_ddl.cut.shards import table_rows
from keras_ddl.strategy.shards import gathered_slots

folder, epochs, kind = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
SHARDING = {"sharded": "optimizer", "weights": "weights", "tables": "weights"}
strategy = keras_ddl.Strategy(sharding=SHARDING.get(kind))
from strategy.common import X, Y, dense_model, set_precision  # noqa: E402  (the import creates another Strategy)

is_victim = sys.argv[4:] == [str(strategy.rank)]  # rank at the start of the job
write_bundles, written = Snapshot.write_bundles, []


def write_or_die(self, folder, writer=None):
    if len(written) == 1 and is_victim:
        os.kill(os.getpid(), signal.SIGKILL)
    written.append(folder)
    return write_bundles(self, folder, writer)


Snapshot.write_bundles = write_or_die
table_rows.USUAL_LINES = 10  # the last batch opens extents, for which small tables would be gathered
WORDS = np.random.default_rng(5).zipf(1.5, (len(X), 3)) % 400


def tables() -> keras.Model:
    words = keras.Input((3,), dtype="int64")
    one, other = (keras.layers.Embedding(400 + n, 4) for n in range(2))
    rows = keras.layers.Concatenate(axis=1)([one(words), other(words), one(words[:, ::2])])
    return keras.Model(words, keras.layers.Dense(2)(keras.layers.Flatten()(rows)))


set_precision("float64")
keras.utils.set_random_seed(11)
with strategy.scope():
    model = tables() if "tables" in kind else dense_model()
    model.compile(keras.optimizers.Adam(1e-2, weight_decay=0.1), "mse", jit_compile=False)
callback = keras_ddl.callbacks.Checkpoint(
    folder / "saved", resume=True, save_freq=4, export_base=False, save_best=False
)
model.fit(
    WORDS if "tables" in kind else X, Y, batch_size=10, epochs=epochs, shuffle=False, verbose=0, callbacks=[callback]
)
assert bool(gathered_slots.slots_of(model)) == (kind in SHARDING and strategy.size > 1)
if kind == "tables" and strategy.size > 1:
    told = strategy.explain(model)
    assert "rows of tables of" in told and "needs all rows" not in told, told
with strategy.whole_model(model):
    found = [*model.get_weights(), *(each.numpy() for each in model.optimizer.variables)]
assert strategy.size == 1 or kind not in SHARDING or written  # each rank wrote its own
if strategy.rank == 0:
    np.savez(folder / f"{kind}_{strategy.size}_{epochs}.npz", *found)
