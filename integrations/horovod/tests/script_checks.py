"""Patterns of Horovod's example scripts, and of users: copies, resuming, several models."""

import copy
import pickle
import tempfile
import warnings
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from horovod_training import (
    BATCH,
    RANK,
    SIZE,
    STEPS,
    X,
    Y,
    all_batches,
    assert_close,
    compare,
    dense_model,
    fit,
    mine,
    raises,
)

import keras_ddl
import keras_ddl.horovod as ddl_hvd
from harness.rank_program import long
from keras_ddl.errors import ConfigError
from keras_ddl.horovod import keras as hvd
from keras_ddl.horovod.optimizer import DistributedOptimizer
from keras_ddl.horovod.tape import DistributedGradientTape

SGD, Adam = keras.optimizers.SGD, keras.optimizers.Adam


def folder():
    return Path(keras_ddl.broadcast_object(tempfile.mkdtemp()))


def check_mismatched_gradients_are_failed_preconditions():
    if SIZE == 1:
        return
    value, optimizer = tf.Variable(tf.zeros([2 + RANK])), DistributedOptimizer(SGD(1.0))

    def gradient():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(value)
        return DistributedGradientTape(tape).gradient(loss, value)

    wrong = tf.errors.FailedPreconditionError
    raises(wrong, "DistributedGradientTape", gradient)
    raises(wrong, "DistributedGradientTape", tf.function(gradient))
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1 + RANK)])
    model.compile(DistributedOptimizer(SGD(0.1)), "mse")
    broadcast = {"callbacks": [hvd.callbacks.BroadcastGlobalVariablesCallback(0)], "verbose": 0}
    raises(wrong, "dense", lambda: model.fit(mine(X), mine(Y)[:, : 1 + RANK], **broadcast))
    raises(wrong, "DistributedSGD", lambda: optimizer.apply([tf.ones([2 + RANK])], [keras.Variable(value)]))
    np.testing.assert_allclose(hvd.allreduce(1.0, op=hvd.Sum), SIZE)


def check_optimizer_does_not_reduce_tape_gradients_again():
    table, value = tf.Variable(tf.zeros([2, 1])), keras.Variable(0.0)
    optimizer = DistributedOptimizer(SGD(1.0), op=hvd.Sum)

    def step():
        with tf.GradientTape() as tape:
            loss = (tf.reduce_sum(tf.gather(table, [1])) + tf.cast(value, "float32")) * (RANK + 1.0)
        tape = DistributedGradientTape(tape, op=hvd.Sum)
        gradients = tape.gradient(loss, [table, value])
        optimizer.apply(gradients, [keras_table, value])

    keras_table = keras.Variable(tf.zeros([2, 1]))
    for run in (step, tf.function(step)):
        run()
    total = 2.0 * sum(range(1, SIZE + 1))
    np.testing.assert_allclose([keras_table.numpy()[1, 0], value.numpy()], [-total, -total])

    def clipped(optimizer=optimizer, largest=1.0):
        with tf.GradientTape() as tape:
            loss = tf.cast(value, "float32") * (RANK + 1.0)
        gradient = DistributedGradientTape(tape, op=hvd.Sum).gradient(loss, value)
        optimizer.apply([tf.clip_by_value(gradient, -largest, largest) if largest else gradient], [value])

    for run in (clipped, tf.function(clipped)):
        raises(ConfigError, "that a DistributedGradientTape has already reduced.*op=Sum", run)
    clipped(DistributedOptimizer(SGD(1.0)))  # the mean of equal values
    np.testing.assert_allclose(value.numpy(), -total - 1)
    summing = DistributedOptimizer(SGD(1.0), op=hvd.Sum, backward_passes_per_step=2)
    raises(ConfigError, "has already reduced", lambda: clipped(summing, largest=None))


def check_tape_with_adaptive_sum():
    value = tf.Variable(tf.zeros([SIZE, 2], tf.float64))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(value[RANK]) * (RANK + 1.0)
    gradient = DistributedGradientTape(tape, op=ddl_hvd.Adasum).gradient(loss, value)
    np.testing.assert_allclose(gradient, np.arange(1.0, SIZE + 1)[:, np.newaxis] * [1, 1])  # orthogonal: their sum
    table = tf.Variable(tf.zeros([SIZE, 2]))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.gather(table, [RANK]))
    tape = DistributedGradientTape(tape, op=ddl_hvd.Adasum)
    raises(ValueError, "sparse_as_dense", lambda: tape.gradient(loss, table))


@long
def check_copies_reduce_or_warn():
    optimizer = DistributedOptimizer(SGD(1.0), backward_passes_per_step=2)
    own, shared = keras.Variable(0.0, dtype="float64"), keras.Variable(0.0, dtype="float64")
    optimizer.register_local_var(own)
    for copied in (copy.deepcopy(optimizer), copy.deepcopy(copy.deepcopy(optimizer))):
        own.assign(0.0)
        shared.assign(0.0)
        for _ in range(2):
            copied.apply([tf.constant(RANK + 1.0, tf.float64)] * 2, [own, shared])
        np.testing.assert_allclose([own.numpy(), shared.numpy()], [-2 * (RANK + 1) / SIZE, -(SIZE + 1)])
    model = dense_model()
    model.compile(DistributedOptimizer(SGD(0.1)), "mse")

    class Own(keras.Sequential):
        def train_step(self, data):
            return {"loss": tf.constant(0.0)}

    by_tape = Own([keras.layers.Dense(2)])
    by_tape.compile(SGD(0.1), "mse")
    cloned, unpickled = keras.models.clone_model(model), pickle.loads(pickle.dumps(model))
    for trained, warned in ((model, 0), (cloned, 1), (cloned, 0), (unpickled, 1), (by_tape, 0)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trained.fit(mine(X), mine(Y), batch_size=BATCH, steps_per_epoch=1, verbose=0)
        texts = [str(each.message) for each in caught if "does not reduce" in str(each.message)]
        assert len(texts) == (warned if SIZE > 1 else 0), (trained, texts)


def check_rank_0_may_load_alone_before_a_broadcast():
    """Broadcasts a model that only rank 0 has loaded, as Horovod's ImageNet example does. The optimizer of the other
    ranks has no variables yet."""
    path = folder() / "model.keras"
    if RANK == 0:
        saved = dense_model()
        fit(saved, SGD(0.1, momentum=0.9), X[:, 0].reshape(-1, 6), Y[:, 0].reshape(-1, 2), BATCH)
        saved.save(path)
    keras_ddl.barrier()
    if RANK == 0:
        model = hvd.load_model(path)
    else:
        model = dense_model()
        model.set_weights([weight + 1 for weight in model.get_weights()])
        model.compile(hvd.DistributedOptimizer(SGD(0.3, momentum=0.9)), "mse")
    alone = keras.models.load_model(path)
    arguments = {"shuffle": False, "verbose": 0}
    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    model.fit(mine(X), mine(Y), batch_size=BATCH, callbacks=[broadcast], **arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the warning that this one does not reduce
        alone.fit(all_batches(X), all_batches(Y), batch_size=BATCH * SIZE, **arguments)
    assert int(model.optimizer.iterations) == 3 * STEPS
    assert_close(model, alone)


@long
def check_load_model_continues_to_accumulate_gradients():
    path, batches = folder() / "model.keras", {"batch_size": BATCH, "shuffle": False, "verbose": 0}
    model = dense_model()
    fit(model, DistributedOptimizer(SGD(0.05), backward_passes_per_step=3), mine(X), mine(Y), BATCH)
    if RANK == 0:
        model.save(path)
    keras_ddl.barrier()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        again, mean = hvd.load_model(path, backward_passes_per_step=3), hvd.load_model(path)
    assert ["backward_passes_per_step=3" in str(each.message) for each in caught] == [True]
    for each in (model, again, mean):
        each.fit(mine(X), mine(Y), **batches)
    assert_close(again, model)
    assert any(np.abs(a - b).max() > 1e-3 for a, b in zip(mean.get_weights(), model.get_weights()))
    keras_ddl.barrier()


@long
def check_several_steps_per_call_equal_one_process():
    compare(lambda: Adam(0.01), compiled={"steps_per_execution": 3})
    oracle = {"oracle": lambda: SGD(0.1, gradient_accumulation_steps=2), "backward_passes_per_step": 2}
    compare(lambda: SGD(0.05), compiled={"steps_per_execution": 4}, **oracle)


def check_rank_outside_the_process_set_keeps_its_gradients():
    first = ddl_hvd.add_process_set([0])
    own, x = keras.Variable(0.0), keras.Variable(0.0)
    optimizer = DistributedOptimizer(
        keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=1.0), process_set=first
    )
    optimizer.register_local_var(own)
    optimizer.apply([tf.constant(RANK + 1.0, tf.float64)] * 2, [own, x])
    assert (float(own.numpy()), float(x.numpy())) == (-(RANK + 1.0), -(RANK + 1.0))
    variable = tf.Variable(1.0)
    with tf.GradientTape() as tape:
        loss = variable * (RANK + 5.0)
    assert float(DistributedGradientTape(tape, process_set=first).gradient(loss, variable)) == RANK + 5.0
    ddl_hvd.remove_process_set(first)
