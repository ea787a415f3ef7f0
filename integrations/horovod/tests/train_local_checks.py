"""Gradients that stay a rank's own: of local layers and variables, and of ranks that are not in a process set."""

import keras
import numpy as np
import tensorflow as tf
from horovod_training import RANK, SIZE

import keras_ddl.horovod as hvd
from keras_ddl.horovod.optimizer import DistributedOptimizer
from keras_ddl.horovod.tape import DistributedGradientTape, PartialDistributedGradientTape

MEAN = (SIZE + 1) / 2  # of rank + 1


def check_a_partial_tape_takes_its_arguments_in_horovods_order():
    layer, shared = keras.layers.Dense(1, use_bias=False), tf.Variable(1.0, dtype="float64")
    layer.build([1, 1])
    tape = PartialDistributedGradientTape(
        tf.GradientTape(), "", "", hvd.Compression.none, False, hvd.Sum, 1.0, 0, None, None, [layer], False
    )
    with tape:
        loss = (tf.reduce_sum(layer.kernel) + shared) * (RANK + 1)
    own, summed = tape.gradient(loss, [layer.kernel, shared], None, True)
    np.testing.assert_allclose([float(own[0, 0]), float(summed)], [RANK + 1, SIZE * MEAN])


def check_local_and_global_gradients_come_apart():
    table, own, shared = tf.Variable(tf.ones([3, 1])), tf.Variable(2.0), keras.Variable(3.0, dtype="float32")
    for scale in (True, False):
        with tf.GradientTape() as tape:
            loss = (tf.reduce_sum(tf.gather(table, [RANK % 3])) + own + shared) * (RANK + 1.0)
        tape = DistributedGradientTape(tape, scale_local_gradients=scale)
        for source in (table, own):
            tape.register_local_source(source)
        local, reduced = tape.get_local_and_global_gradients(loss, [shared, table, own])
        assert [source is one for (source, _), one in zip(local, (table, own))] == [True, True]
        assert len(local) == 2 and len(reduced) == 1 and reduced[0][0] is shared
        expected = (RANK + 1) / (SIZE if scale else 1)
        assert isinstance(local[0][1], tf.IndexedSlices)
        np.testing.assert_allclose([float(local[0][1].values[0, 0]), float(local[1][1])], expected)
        np.testing.assert_allclose(reduced[0][1], MEAN)


def check_a_rank_outside_of_the_process_set_keeps_its_gradients():
    first = hvd.add_process_set([0])
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
    hvd.remove_process_set(first)
