"""Checks every public name of Horovod's elastic modules, as its documentation uses it. Run by test_horovod_training.py.

integrations/horovod/docs/horovod-names.md is generated from these rows and those in name_checks.py.
"""

import keras
import numpy as np
import tensorflow as tf

import keras_ddl.horovod as hvd
from harness.name_tables import BETTER, WORKS, row
from harness.refusing import refuses
from keras_ddl.horovod import elastic
from keras_ddl.horovod import keras as hvd_keras

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()


def own_model():
    """Returns a compiled model whose weights depend on the rank."""
    model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1, use_bias=False, dtype="float32")])
    model.set_weights([np.float32([[RANK + 1.0]])])
    model.compile(keras.optimizers.SGD(0.0), "mse", run_eagerly=True)
    return model


@row(
    "elastic.run",
    BETTER,
    "also after `keras-ddl run --restarts`, from the newest commit on the remaining hosts. Exceptions of "
    "TensorFlow are not caught: the job restarts",
)
@row("elastic.TensorFlowState", WORKS, "`variables` is required; no `session`")
@row("elastic.TensorFlowState.save", WORKS)
@row("elastic.TensorFlowState.restore", WORKS)
@row("elastic.TensorFlowState.sync", WORKS)
def check_name_elastic_run():
    state = hvd.elastic.TensorFlowState(variables=[tf.Variable(RANK + 1.0)], session=None, epoch=RANK)
    called, resets = [], []
    state.register_reset_callbacks([lambda: resets.append(state.epoch)])

    @hvd.elastic.run
    def train(state, factor, *, offset):
        called.append((state.epoch, float(state.variables[0])))
        state.epoch += 1
        state.variables[0].assign_add(1.0)
        if len(called) == 1:
            state.commit()
            state.epoch += 10
            raise elastic.HorovodInternalError
        if len(called) == 2:
            if RANK == SIZE - 1:
                state.on_hosts_updated()
            state.check_host_updates()
        return factor * state.epoch + offset

    assert train(state, 2, offset=5) == 11
    # It begins with rank 0's values, returns to the commit, and continues from where other hosts interrupted it.
    assert called == [(0, 1.0), (1, 2.0), (2, 3.0)] and resets == [1, 2], (called, resets)

    @hvd.elastic.run
    def fails(state):
        raise ZeroDivisionError

    refuses(lambda: fails(state), error=ZeroDivisionError)
    state.variables[0].assign(2.0)
    state.save()
    state.variables[0].assign(RANK + 9.0)
    state.restore()
    assert float(state.variables[0]) == 2
    state.variables[0].assign(RANK + 3.0)
    state.sync()
    assert float(state.variables[0]) == 3
    refuses(hvd.elastic.TensorFlowState, "variables")


@row("elastic.TensorFlowKerasState", WORKS, "of a built model; builds the optimizer if needed; `backend` does nothing")
@row(
    "elastic.TensorFlowKerasState.sync",
    WORKS,
    "all ranks get rank 0's state; random layers keep a stream per rank",
)
@row("elastic.TensorFlowKerasState.save", WORKS)
@row("elastic.TensorFlowKerasState.restore", WORKS)
@row("elastic.TensorFlowKerasState.commit", BETTER, "also on each host's disk, for a restart")
@row("elastic.TensorFlowKerasState.register_reset_callbacks", WORKS)
@row("elastic.TensorFlowKerasState.on_reset", WORKS)
@row("elastic.TensorFlowKerasState.reset", WORKS)
@row("elastic.TensorFlowKerasState.on_hosts_updated", WORKS, "on any rank; Horovod asks rank 0 only")
@row("elastic.TensorFlowKerasState.check_host_updates", WORKS)
def check_name_TensorFlowKerasState():
    model, called = own_model(), []

    class State(hvd.elastic.TensorFlowKerasState):
        def reset(self):
            called.append("reset")

    state = State(model, optimizer=model.optimizer, backend=None, epoch=RANK)
    state.sync()
    assert state.epoch == 0 and float(model.get_weights()[0][0, 0]) == 1
    state.epoch = 2
    state.commit()
    state.epoch = 3
    model.set_weights([np.float32([[5.0]])])
    state.restore()
    assert state.epoch == 2 and float(model.get_weights()[0][0, 0]) == 1
    state.epoch = 4
    state.save()
    state.restore()
    assert state.epoch == 4
    state.register_reset_callbacks(callbacks=[lambda: called.append(state.epoch)])
    state.check_host_updates()
    if RANK == SIZE - 1:
        state.on_hosts_updated(timestamp=1, update_res=1)
    try:
        state.check_host_updates()
    except elastic.HostsUpdatedInterrupt:
        state.on_reset()
    assert called == ["reset", 4]


@row("keras.elastic.KerasState", WORKS)
@row(
    "keras.elastic.CommitStateCallback",
    BETTER,
    "commits after all callbacks have seen the batch, so their order does not matter",
)
@row("keras.elastic.CommitStateCallback.commit", WORKS)
@row(
    "keras.elastic.UpdateBatchStateCallback",
    BETTER,
    "`state.batch` counts finished batches, and a fit skips that many; Horovod repeats the last one",
)
@row("keras.elastic.UpdateEpochStateCallback", WORKS)
def check_name_KerasState():
    commits = []

    class Counted(hvd_keras.elastic.KerasState):
        def commit(self):
            commits.append((self.epoch, self.batch))
            super().commit()

    model = own_model()
    state = Counted(model, optimizer=None, batch=0, epoch=0)
    hvd_keras.elastic.CommitStateCallback(state).commit()
    callbacks = [
        hvd_keras.elastic.CommitStateCallback(state, batches_per_commit=2),
        hvd_keras.elastic.UpdateBatchStateCallback(state),
        hvd_keras.elastic.UpdateEpochStateCallback(state),
    ]
    model.fit(np.ones([3, 1]), np.ones([3, 1]), batch_size=1, epochs=2, verbose=0, callbacks=callbacks)
    assert (state.epoch, state.batch) == (2, 0)
    assert commits == [(0, 0), (0, 2), (1, 0), (1, 1)], commits  # every second batch, and each epoch
