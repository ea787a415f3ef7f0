"""hvd.elastic inside running processes: states, commits and interruptions. Run by test_horovod_training.py."""

import itertools
import os
import shutil
import tempfile
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import keras_ddl
import keras_ddl.horovod as hvd
from keras_ddl.errors import CheckpointError, ConfigError
from keras_ddl.horovod import elastic_state
from keras_ddl.horovod import keras as hvd_keras

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()


def elastic_model():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dropout(0.5)])
    model.compile(keras.optimizers.Adam(0.1), "mse")
    model.set_weights([np.full(weight.shape, RANK + 1.0) for weight in model.get_weights()])
    return model


def raised_by(call):
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def check_elastic_state_syncs_from_rank_0_and_returns_to_its_commit():
    model = elastic_model()
    state = hvd.elastic.TensorFlowKerasState(model, batch=RANK, names=[RANK])
    state.sync()
    assert state.batch == 0 and state.names == [0] and (model.get_weights()[0] == 1.0).all()
    seeds = hvd.allgather_object(model.layers[-1].seed_generator.state.numpy().tolist())
    assert len({tuple(seed) for seed in seeds}) == SIZE, seeds  # each rank has its own dropout
    state.names.append("committed")
    model.layers[0].bias.assign([5.0] * 4)
    state.commit()
    state.names.append("lost")
    state.batch = 7
    model.fit(np.ones((4, 3)), np.ones((4, 4)), verbose=0)
    state.restore()
    assert (state.batch, state.names) == (0, [0, "committed"])
    assert (model.get_weights()[1] == 5.0).all() and int(model.optimizer.iterations.numpy()) == 0


def check_reset_callbacks_may_use_keras_2_names():
    model = elastic_model()
    optimizer, rates = model.optimizer, []
    state = hvd.elastic.TensorFlowKerasState(model)
    setters = [
        lambda: optimizer.lr.assign(0.2),
        lambda: keras.backend.set_value(optimizer.lr, 2 * keras.backend.get_value(optimizer.lr)),
        lambda: tf.keras.backend.set_value(model.optimizer.lr, 0.6),
        lambda: setattr(optimizer, "lr", 0.8),
    ]
    for setter in setters:
        state.register_reset_callbacks([setter, lambda: rates.append(float(optimizer.learning_rate))])
    state.on_reset()
    np.testing.assert_allclose(rates, [0.2, 0.4, 0.6, 0.8], rtol=1e-6)
    assert not hasattr(optimizer, "lr") and not hasattr(keras.backend, "set_value")


def check_elastic_state_continues_from_newest_commit_in_another_process():
    folder = keras_ddl.broadcast_object(tempfile.mkdtemp() if RANK == 0 else "")
    os.environ["KERAS_DDL_COMMIT_DIR"] = folder
    first_of_next_process = next(elastic_state._states) + 1
    try:
        state = hvd.elastic.TensorFlowKerasState(elastic_model(), epoch=0)
        state.sync()
        for epoch in (1, 2):
            state.epoch = epoch
            state.model.layers[0].bias.assign([10.0 * epoch] * 4)
            state.commit()
        hvd.allgather_object("all have committed")
        assert [p.name for p in sorted(Path(folder).glob("commits/*/*/*"))] == ["ckpt-00000001", "ckpt-00000002"]

        def in_another_process(build):
            elastic_state._states = itertools.count(first_of_next_process)
            later, resets = build(), []
            later.register_reset_callbacks([lambda: resets.append(later.epoch)])
            assert hvd.elastic.run(lambda state: state.epoch)(later) == 2 and resets == [2]
            return later

        later = in_another_process(lambda: hvd.elastic.TensorFlowKerasState(elastic_model(), epoch=0))
        assert (later.model.get_weights()[1] == 20.0).all()
        later.epoch = 3
        later.commit()
        assert later.content()["variables"] and later._number == 3
        error = raised_by(lambda: in_another_process(lambda: hvd.elastic.TensorFlowState([tf.Variable(1.0)], epoch=0)))
        assert isinstance(error, CheckpointError) and "9 variables there, 1 here" in str(error), error
    finally:
        del os.environ["KERAS_DDL_COMMIT_DIR"]
        hvd.allgather_object("all have read")
        shutil.rmtree(folder, ignore_errors=True)


def check_elastic_callbacks_count_batches_and_skip_finished_ones():
    model = elastic_model()
    hvd.broadcast_variables(model.variables, 0)
    state = hvd_keras.elastic.KerasState(model, batch=3, epoch=4)
    seen = []

    class Seen(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            seen.append((state.epoch, batch, state.batch))

    elastic_callbacks = hvd_keras.elastic
    callbacks = [Seen(), elastic_callbacks.UpdateBatchStateCallback(state)]
    callbacks.append(elastic_callbacks.UpdateEpochStateCallback(state))
    data = tf.data.Dataset.from_tensor_slices((np.ones((8, 3)), np.ones((8, 4)))).repeat().batch(2)
    model.fit(data, steps_per_epoch=4, epochs=6, initial_epoch=4, verbose=0, callbacks=callbacks)
    assert seen == [(4, 3, 3), (5, 0, 0), (5, 1, 1), (5, 2, 2), (5, 3, 3)], seen
    assert (state.epoch, state.batch) == (6, 0)
    assert int(model.optimizer.iterations.numpy()) == 5


def check_elastic_mistakes_are_named():
    unbuilt = keras.Sequential([keras.layers.Dense(1)])
    built = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    for call, text in (
        (lambda: hvd.elastic.TensorFlowKerasState(unbuilt), "must be built"),
        (lambda: hvd.elastic.TensorFlowKerasState(built), "not compiled"),
        (lambda: hvd.elastic.TensorFlowState(), "Received: no variables"),
        (lambda: hvd.elastic.TensorFlowState([tf.Variable(1.0)], session=object()), "a session of TensorFlow 1"),
    ):
        error = raised_by(call)
        assert isinstance(error, ConfigError) and isinstance(error, ValueError) and text in str(error), error
