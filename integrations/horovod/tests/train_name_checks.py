"""Checks every public name of Horovod for training, as its documentation uses it. Run by test_horovod_training.py.

integrations/horovod/docs/horovod-names.md is generated from these rows and those in name_checks.py.
"""

import shutil
import tempfile
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import keras_ddl.horovod as hvd
from harness.name_tables import BETTER, REFUSED, WORKS, row
from harness.refusing import refuses
from keras_ddl.horovod import keras as hvd_keras

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
MEAN = np.array([1.0, 2.0]) * (SIZE + 1) / 2
TOTAL = MEAN * SIZE


def assert_same(actual, expected, rtol=1e-6):
    np.testing.assert_allclose(np.asarray(actual), expected, rtol=rtol, atol=1e-7)


def mine():
    """Returns this rank's gradient: [1, 2] on rank 0, [2, 4] on rank 1."""
    return tf.constant([1.0, 2.0]) * (RANK + 1)


def stepped(make, gradient=None, steps=1, slices=False, **arguments):
    """Returns by how much SGD at rate 1 lowers zeros in some steps with `gradient`, or this rank's gradient."""
    variable = keras.Variable(np.zeros([SIZE, 2] if slices else [2]), dtype="float32")
    optimizer = make(keras.optimizers.SGD(1.0), **arguments)
    for _ in range(steps):
        optimizer.apply([mine() if gradient is None else gradient], [variable])
    return -np.asarray(variable)


# ---- DistributedOptimizer --------------------------------------------------------------------------------------------


@row(
    "DistributedOptimizer",
    BETTER,
    "changes the given optimizer: its class, state and saved form stay; clipping, weight decay and EMA see the "
    "average; an overflow under LossScaleOptimizer skips the step on all ranks",
    by_keyword="use_locking device_dense device_sparse compression sparse_as_dense backward_passes_per_step op "
    "gradient_predivide_factor average_aggregated_gradients num_groups groups process_set scale_local_gradients",
)
@row("DistributedOptimizer(optimizer)", WORKS, "of Keras 3 or tf.compat.v1.train; a name is refused")
@row("DistributedOptimizer(use_locking)", WORKS, "does nothing, as `device_dense` and `device_sparse`")
@row("DistributedOptimizer(op)", WORKS, "Average or Sum, as in Horovod with Keras; others in the tape")
@row("DistributedOptimizer(compression)", WORKS)
@row("DistributedOptimizer(gradient_predivide_factor)", WORKS)
@row(
    "DistributedOptimizer(groups)",
    WORKS,
    "a number of buckets, or the buckets; by default [measured](../../../docs/strategy.md#buckets)",
)
@row("DistributedOptimizer(num_groups)", WORKS, "the old name of `groups`")
@row("DistributedOptimizer(process_set)", WORKS)
@row("DistributedOptimizer(sparse_as_dense)", WORKS)
@row(
    "keras.DistributedOptimizer",
    BETTER,
    "the same",
    by_keyword="device_dense device_sparse compression sparse_as_dense gradient_predivide_factor op "
    "backward_passes_per_step average_aggregated_gradients num_groups groups process_set scale_local_gradients",
)
def check_name_DistributedOptimizer():
    make = hvd.DistributedOptimizer
    assert hvd_keras.DistributedOptimizer is make
    sgd = keras.optimizers.SGD(1.0)
    assert make(sgd, "Reducing") is sgd
    assert_same(stepped(make, use_locking=True, device_dense="/cpu:0", device_sparse="/cpu:0"), MEAN)
    assert_same(stepped(make, op=hvd.Sum, compression=hvd.Compression.fp16), TOTAL)
    assert_same(stepped(make, gradient_predivide_factor=2.0, groups=1), MEAN)
    assert_same(stepped(make, num_groups=1), MEAN)
    grouped, other = (keras.Variable([0.0, 0.0], dtype="float32") for _ in range(2))
    make(keras.optimizers.SGD(1.0), groups=[[grouped]]).apply([mine(), mine()], [other, grouped])
    assert_same(-np.asarray(grouped), MEAN)
    assert_same(-np.asarray(other), MEAN)
    assert_same(stepped(make, process_set=hvd.global_process_set, scale_local_gradients=False), MEAN)
    slices = tf.IndexedSlices(tf.constant([[1.0, 2.0]]), tf.constant([RANK]), tf.constant([SIZE, 2]))
    for dense in (False, True):
        found = stepped(make, slices, slices=True, sparse_as_dense=dense)
        assert_same(found, np.array([[1.0, 2.0]] * SIZE) / SIZE)
    variable = tf.Variable([0.0, 0.0])
    make(tf.compat.v1.train.GradientDescentOptimizer(1.0)).apply_gradients([(mine(), variable)])
    assert_same(-variable.numpy(), MEAN)
    refuses(lambda: make("adam"), "optimizer of Keras 3")
    refuses(lambda: make(keras.optimizers.SGD(), op=hvd.Adasum), "DistributedGradientTape")


@row(
    "DistributedOptimizer(backward_passes_per_step)",
    BETTER,
    "one reduction per update, embeddings too; saved as `gradient_accumulation_steps`",
)
@row("DistributedOptimizer(average_aggregated_gradients)", WORKS)
def check_name_backward_passes_per_step():
    make = hvd.DistributedOptimizer
    assert_same(stepped(make, steps=1, backward_passes_per_step=2), [0, 0])
    assert_same(stepped(make, steps=2, backward_passes_per_step=2), 2 * MEAN)
    averaged = stepped(make, steps=2, backward_passes_per_step=2, average_aggregated_gradients=True)
    assert_same(averaged, MEAN)


@row("keras.DistributedOptimizer.apply_gradients", WORKS)
@row("keras.DistributedOptimizer.variables", WORKS, "a property in Keras 3: no `()`")
@row("keras.DistributedOptimizer.register_local_var", WORKS)
@row("keras.DistributedOptimizer.compute_gradients", REFUSED, "Keras 3 has none: `tape.gradient`")
@row("keras.DistributedOptimizer.get_gradients", REFUSED, "Keras 3 has none: `tape.gradient`")
def check_name_apply_gradients():
    variable = keras.Variable([0.0, 0.0], dtype="float32")
    optimizer = hvd_keras.DistributedOptimizer(keras.optimizers.SGD(1.0, momentum=0.5))
    optimizer.apply_gradients([(mine(), variable)])
    assert_same(-np.asarray(variable), MEAN)
    hvd.broadcast_variables(optimizer.variables, root_rank=0)
    assert_same(optimizer.variables[-1], -MEAN)
    own = keras.Variable([0.0, 0.0], dtype="float32")
    optimizer = hvd_keras.DistributedOptimizer(keras.optimizers.SGD(1.0))
    optimizer.register_local_var(var=own)
    optimizer.apply_gradients([(mine(), own)])
    assert_same(-np.asarray(own), mine() / SIZE)
    refuses(lambda: optimizer.compute_gradients, error=AttributeError)
    refuses(lambda: optimizer.get_gradients, error=AttributeError)


@row(
    "keras.PartialDistributedOptimizer",
    BETTER,
    "layers may be built later",
    by_keyword="device_dense device_sparse compression sparse_as_dense gradient_predivide_factor op groups "
    "process_set local_layers scale_local_gradients",
)
@row("keras.PartialDistributedOptimizer(local_layers)", WORKS)
@row("keras.PartialDistributedOptimizer(scale_local_gradients)", WORKS, "True: divided by the number of ranks")
def check_name_PartialDistributedOptimizer():
    for scale, divisor in ((True, SIZE), (False, 1)):
        layer = keras.layers.Dense(2, use_bias=False, kernel_initializer="zeros", dtype="float32")
        optimizer = hvd_keras.PartialDistributedOptimizer(
            keras.optimizers.SGD(1.0), local_layers=layer, scale_local_gradients=scale, op=hvd.Average
        )
        layer.build([None, 1])
        shared = keras.Variable([0.0, 0.0], dtype="float32")
        optimizer.apply([tf.reshape(mine(), [1, 2]), mine()], [layer.kernel, shared])
        assert_same(-np.asarray(layer.kernel)[0], mine() / divisor)
        assert_same(-np.asarray(shared), MEAN)


# ---- tapes -----------------------------------------------------------------------------------------------------------


@row("DistributedGradientTape", BETTER, "around a finished tape or in the `with`; all operations")
@row("DistributedGradientTape.gradient", BETTER, "any structure of sources; None among gradients")
@row("DistributedGradientTape.register_local_source", WORKS)
@row("DistributedGradientTape.get_local_and_global_gradients", WORKS)
def check_name_DistributedGradientTape():
    a, b = tf.Variable([0.0, 0.0]), tf.Variable([0.0, 0.0])
    everything = {
        "device_dense": "", "device_sparse": "", "compression": hvd.Compression.none, "sparse_as_dense": True,
        "op": hvd.Average, "gradient_predivide_factor": 2.0, "num_groups": 0, "groups": 2,
        "process_set": hvd.global_process_set, "scale_local_gradients": True,
    }  # fmt: skip
    with tf.GradientTape(persistent=True) as tape:
        loss = tf.reduce_sum((a + b) * mine())
    tape = hvd.DistributedGradientTape(tape, **everything)
    assert_same(tape.gradient(loss, [a, b]), [MEAN, MEAN])
    tape.register_local_source(b)
    found = tape.gradient(loss, {"a": a, "b": b}, output_gradients=None, use_generic_names=True)
    assert_same(found["a"], MEAN)
    assert_same(found["b"], mine() / SIZE)
    own, shared = tape.get_local_and_global_gradients(
        target=loss, sources=[a, b], output_gradients=None, use_generic_names=True
    )
    assert own[0][0] is b and shared[0][0] is a and len(own) == len(shared) == 1
    assert_same(own[0][1], mine() / SIZE)
    assert_same(shared[0][1], MEAN)
    with hvd.DistributedGradientTape(tf.GradientTape(), op=hvd.Max) as tape:
        loss = tf.reduce_sum(a * mine())
    assert_same(tape.gradient(loss, a), [SIZE, 2 * SIZE])


@row("PartialDistributedGradientTape", WORKS, "layers may be built later")
def check_name_PartialDistributedGradientTape():
    layer = keras.layers.Dense(2, use_bias=False, dtype="float32")
    layer.build([None, 1])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(tf.ones([1, 1])) * mine())
    tape = hvd.PartialDistributedGradientTape(tape, local_layers=[layer], scale_local_gradients=False)
    (found,) = tape.gradient(loss, layer.trainable_variables)
    assert_same(found[0], mine())


# ---- layers, models, Keras -------------------------------------------------------------------------------------------


@row("SyncBatchNormalization", BETTER, "also with a mask and unequal rows; large means do not cancel")
@row("SyncBatchNormalization(fused)", REFUSED, "True, as in Horovod")
def check_name_SyncBatchNormalization():
    layer = hvd.SyncBatchNormalization(axis=-1, momentum=0.5, epsilon=0.0, dtype="float32")
    rows = np.arange(4.0 * SIZE).reshape(2 * SIZE, 2)
    found = layer(rows[2 * RANK : 2 * RANK + 2], training=True)
    assert_same(found, ((rows - rows.mean(0)) / rows.std(0))[2 * RANK : 2 * RANK + 2], rtol=1e-5)
    assert_same(layer.moving_mean, rows.mean(0) / 2)
    refuses(lambda: hvd.SyncBatchNormalization(fused=True), "fused")


@row("keras.allreduce", WORKS, "Horovod's Keras order of parameters; takes arrays, returns a tensor")
@row("keras.allgather", WORKS)
@row("keras.broadcast", WORKS)
@row("keras.reducescatter", WORKS)
def check_name_keras_allreduce():
    value = np.float32([RANK + 1.0, 2.0])
    found = hvd_keras.allreduce(value, "loss", None, 2.0, 0.5, hvd.Sum, hvd.Compression.fp16)
    assert_same(found, [SIZE * (SIZE + 1) / 2, 2 * SIZE])
    assert_same(hvd_keras.allreduce(value=value, average=True), [(SIZE + 1) / 2, 2])
    assert_same(hvd_keras.allgather(value=value[:1], name="rows"), np.arange(1, SIZE + 1))
    assert_same(hvd_keras.broadcast(value=value, root_rank=SIZE - 1, name="sent"), [SIZE, 2])
    assert_same(hvd_keras.reducescatter(value=np.ones(SIZE, np.float32), name="rest", op=hvd.Sum), [SIZE])


@row("keras.load_model", BETTER, "with the optimizer's state, saved with a DistributedOptimizer or not")
@row("keras.load_model(legacy_opts)", REFUSED, "True: Keras 3 has no legacy optimizers")
def check_name_load_model():
    class Mine(keras.optimizers.SGD):
        """A user's own optimizer class."""

    folder = hvd.broadcast_object(tempfile.mkdtemp())
    if RANK == 0:
        model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1, kernel_initializer="zeros", dtype="float32")])
        model.compile(Mine(1.0), "mse", run_eagerly=True)
        model.save(f"{folder}/model.keras")
    hvd.allreduce(tf.ones([1]))
    model = hvd_keras.load_model(
        f"{folder}/model.keras", custom_optimizers=[Mine], custom_objects={}, compression=hvd.Compression.fp16
    )
    model.run_eagerly = True
    x = np.full([1, 1], 1.0, np.float32)
    model.fit(x, np.float32([[RANK + 1.0]]), verbose=0)
    assert_same(model.get_weights()[0], [[SIZE + 1.0]])  # the mean of 2 and 4, each rank's 2 (y - 0) x
    refuses(lambda: hvd_keras.load_model("model.keras", legacy_opts=True), "legacy")
    hvd.allreduce(tf.ones([1]))
    if RANK == 0:
        shutil.rmtree(folder)


@row("keras.broadcast_global_variables", WORKS)
@row("keras.is_version_greater_equal_than", REFUSED, "undocumented, for Horovod's own code")
def check_name_keras_broadcast_global_variables():
    refuses(lambda: hvd_keras.broadcast_global_variables(0), "BroadcastGlobalVariablesCallback")
    refuses(lambda: hvd_keras.is_version_greater_equal_than, "internal to Horovod", error=AttributeError)


# ---- callbacks -------------------------------------------------------------------------------------------------------


def fit(*callbacks, epochs=2, rows=2, **arguments):
    """Fits a model that starts differently on each rank, on the rank's rows: (model, logs, rates at batch begin)."""
    rates = []
    watch = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: rates.append(float(model.optimizer.learning_rate))
    )
    model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1, dtype="float32")])
    model.set_weights([np.float32([[RANK + 1.0]]), np.float32([RANK])])
    model.compile(arguments.pop("optimizer", None) or keras.optimizers.SGD(0.0), "mse", run_eagerly=True)
    data = np.full([rows, 1], RANK + 1.0, np.float32), np.zeros([rows, 1], np.float32)
    history = model.fit(*data, batch_size=1, epochs=epochs, verbose=0, callbacks=[*callbacks, watch], **arguments)
    return model, history.history, rates


@row(
    "callbacks.BroadcastGlobalVariablesCallback",
    BETTER,
    "before the first batch; Horovod's comes after it, so ranks take the first step from different weights. "
    "Dropout draws per rank; `device` does nothing",
)
@row("callbacks.BroadcastGlobalVariablesCallback(local_variables)", WORKS)
@row("callbacks.BroadcastGlobalVariablesCallback.register_local_var", WORKS)
def check_name_BroadcastGlobalVariablesCallback():
    model, _, _ = fit(hvd_keras.callbacks.BroadcastGlobalVariablesCallback(SIZE - 1, device="/cpu:0"), epochs=1)
    assert_same(model.get_weights()[0], [[SIZE]])
    layer = keras.layers.Dense(1, dtype="float32")
    model = keras.Sequential([keras.Input([1]), layer])
    model.set_weights([np.float32([[RANK]]), np.float32([RANK])])
    model.compile(keras.optimizers.SGD(0.0), "mse", run_eagerly=True)
    callback = hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=[layer.bias])
    callback.register_local_var(layer.kernel)
    model.fit(np.ones([1, 1]), np.ones([1, 1]), verbose=0, callbacks=[callback])
    assert_same([each.ravel()[0] for each in model.get_weights()], [RANK, RANK])


@row(
    "callbacks.MetricAverageCallback",
    BETTER,
    "weighted by rows; Horovod weighs ranks equally, as here only after a `train_step` that counts no rows. "
    "`device` does nothing",
)
def check_name_MetricAverageCallback():
    rows = np.arange(1, SIZE + 1)
    average = hvd_keras.callbacks.MetricAverageCallback(device="")
    validation = np.full([3 * RANK + 1, 1], RANK + 1.0), np.zeros([3 * RANK + 1, 1])
    _, logs, _ = fit(average, rows=RANK + 1, validation_data=validation)
    losses = (rows * rows + rows - 1.0) ** 2  # weight rank + 1, bias rank, input rank + 1, label 0
    assert_same(logs["loss"], [np.average(losses, weights=rows)] * 2)
    assert_same(logs["val_loss"], [np.average(losses, weights=3 * rows - 2)] * 2)


@row(
    "callbacks.LearningRateScheduleCallback",
    BETTER,
    "works with ReduceLROnPlateau; corrects Nesterov momentum, too; logs `lr` and `learning_rate`",
)
@row(
    "callbacks.LearningRateScheduleCallback(multiplier)",
    BETTER,
    "a number applies to every epoch, as documented; Horovod raises it to the number of epochs",
)
@row("callbacks.LearningRateScheduleCallback(initial_lr)", WORKS)
@row("callbacks.LearningRateWarmupCallback", BETTER, "Horovod's formula")
def check_name_LearningRateScheduleCallback():
    schedule, warmup = hvd_keras.callbacks.LearningRateScheduleCallback, hvd_keras.callbacks.LearningRateWarmupCallback
    later = schedule(0.4, multiplier=0.1, start_epoch=1, end_epoch=3, staircase=True, momentum_correction=True)
    first = warmup(initial_lr=0.4, warmup_epochs=1, momentum_correction=True, steps_per_epoch=2, verbose=0)
    _, logs, rates = fit(first, later, epochs=3, optimizer=keras.optimizers.SGD(0.4, momentum=0.9))
    ramp = [0.4 / SIZE * ((step + 1) / 2 * (SIZE - 1) + 1) for step in range(2)]
    assert_same(rates, [ramp[0] - (ramp[1] - ramp[0]), ramp[0], 0.04, 0.04, 0.04, 0.04], rtol=1e-5)
    assert_same(logs["lr"], logs["learning_rate"])
    smooth = schedule(0.4, lambda epoch: 1 / (1 + epoch), staircase=False, steps_per_epoch=2, end_epoch=None)
    assert_same(fit(smooth)[2], [0.4 / (1 + step / 2) for step in range(4)], rtol=1e-5)
    refuses(lambda: schedule(initial_lr=None, multiplier=0.1), "initial_lr")
    refuses(lambda: warmup(initial_lr=None), "initial_lr")


@row(
    "callbacks.BestModelCheckpoint",
    BETTER,
    "rank 0 writes; `filepath` is an argument or, as in Horovod, an attribute",
    by_keyword="mode save_freq",
)
def check_name_BestModelCheckpoint():
    folder = Path(tempfile.mkdtemp())  # one for each rank
    arguments = {"monitor": "loss", "verbose": 0, "save_weights_only": True, "mode": "min", "save_freq": "epoch"}
    best = hvd_keras.callbacks.BestModelCheckpoint(**arguments)
    refuses(lambda: fit(best), "filepath")
    best.filepath = str(folder / "best.weights.h5")
    fit(best)
    assert [each.name for each in folder.iterdir()] == (["best.weights.h5"] if RANK == 0 else [])
    shutil.rmtree(folder)
