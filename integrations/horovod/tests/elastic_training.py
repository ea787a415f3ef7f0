"""A fit with hvd.elastic that is killed in the middle and restarted by `keras-ddl run --restarts`.

Run by test_elastic.py. The last rank is killed in the first attempt. The last attempt then trains once more, without
a kill, for comparison.
"""

import json
import os
import signal
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import keras_ddl.horovod.keras as hvd
from keras_ddl import config

EPOCHS, STEPS, BATCH = 3, 5, 4

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
ATTEMPT = config.get("RESTART")
rng = np.random.default_rng(0)
x = rng.normal(size=(STEPS, SIZE, BATCH, 6)).astype("float32")[:, RANK].reshape(-1, 6)
y = rng.normal(size=(STEPS, SIZE, BATCH, 2)).astype("float32")[:, RANK].reshape(-1, 2)
dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)


class Note(keras.callbacks.Callback):
    never_stops_within_epoch = True

    def __init__(self, state, dies):
        super().__init__()
        self.state, self.dies = state, dies

    def on_train_batch_end(self, batch, logs=None):
        self.state.seen.append([self.state.epoch, batch])

    def on_train_batch_begin(self, batch, logs=None):
        if self.dies and (self.state.epoch, batch) == (1, 3):
            Path("dead").touch()
            os.kill(os.getpid(), signal.SIGKILL)


def train(begins_alike, dies):
    keras.utils.set_random_seed(4 if begins_alike and RANK == 0 else 5 + RANK)
    layers = [keras.layers.Dense(8, activation="tanh"), keras.layers.Dropout(0.3), keras.layers.Dense(2)]
    model = keras.Sequential([keras.Input((6,)), *layers])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse")
    state = hvd.elastic.KerasState(model, batch=0, epoch=0, seen=[])
    resets = []
    state.register_reset_callbacks([lambda: resets.append([state.epoch, state.batch, len(state.seen)])])
    callbacks = [  # in this order, commits made immediately would be one batch behind
        hvd.elastic.CommitStateCallback(state, batches_per_commit=2),
        hvd.elastic.UpdateBatchStateCallback(state),
        Note(state, dies),
        hvd.elastic.UpdateEpochStateCallback(state),
    ]

    @hvd.elastic.run
    def fit(state):
        model.fit(dataset, epochs=EPOCHS - state.epoch, callbacks=callbacks, verbose=0)

    fit(state)
    assert state.epoch == EPOCHS and state.batch == 0
    values = [v.numpy() for v in [*model.variables, *model.optimizer.variables]]
    trainable = [v.numpy().tobytes() for v in model.trainable_variables]
    assert hvd.allgather_object(trainable) == [trainable] * SIZE
    return resets, state.seen, values


# After a restart the script begins with other weights, which the commit replaces.
killed = train(begins_alike=ATTEMPT == 0, dies=ATTEMPT == 0 and RANK == SIZE - 1)
whole = train(begins_alike=True, dies=False)
equal = all(np.array_equal(a, b) for a, b in zip(killed[2], whole[2], strict=True))
if RANK == 0:
    result = {"resets": killed[0], "seen": killed[1] == whole[1], "equal": equal, "size": SIZE, "attempt": ATTEMPT}
    Path("result.json").write_text(json.dumps(result))
