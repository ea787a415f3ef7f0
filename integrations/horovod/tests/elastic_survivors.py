"""A fit with hvd.elastic in which one rank is killed and the others continue. Run by test_elastic.py.

elastic_survivors.py RANK   RANK is killed in the second epoch
"""

import json
import os
import signal
import sys

import keras
import numpy as np

import keras_ddl.horovod.keras as hvd

hvd.init()
ME, VICTIM = hvd.rank(), int(sys.argv[1])
x = np.random.default_rng(0).normal(size=(240, 6)).astype("float32")
model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)])
model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse")


class Dies(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        if ME == VICTIM and (state.epoch, batch) == (1, 7):
            os.kill(os.getpid(), signal.SIGKILL)


state, resets = hvd.elastic.KerasState(model, batch=0, epoch=0), []
state.register_reset_callbacks([lambda: resets.append([hvd.size(), state.epoch, state.batch])])


@hvd.elastic.run
def train(state):
    callbacks = [
        hvd.elastic.CommitStateCallback(state, batches_per_commit=2),
        hvd.elastic.UpdateBatchStateCallback(state),
        Dies(),
        hvd.elastic.UpdateEpochStateCallback(state),
    ]
    mine = x[hvd.rank() :: hvd.size()]
    model.fit(mine, mine[:, :1], batch_size=8, epochs=3 - state.epoch, verbose=0, callbacks=callbacks)


train(state)
weights = [weight.tobytes() for weight in model.get_weights()]
equal = hvd.allgather_object(weights) == [weights] * hvd.size()
print(json.dumps([ME, hvd.rank(), state.epoch, resets, equal]), flush=True)
