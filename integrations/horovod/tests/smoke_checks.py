"""Sums over ranks, and an optimizer step. Run by test_smoke.py."""

import keras
import numpy as np
import tensorflow as tf

import keras_ddl.horovod as hvd
from keras_ddl.horovod.optimizer import DistributedOptimizer

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()


def check_allreduce_sums_and_averages():
    x = tf.constant([1.0, 2.0]) * (RANK + 1.0)
    total = SIZE * (SIZE + 1) / 2
    np.testing.assert_allclose(hvd.allreduce(x, op=hvd.Sum), [total, 2 * total])
    np.testing.assert_allclose(hvd.allreduce(x), [total / SIZE, 2 * total / SIZE])


def check_optimizer_applies_the_mean_of_all_ranks():
    shared = keras.Variable(0.0)
    DistributedOptimizer(keras.optimizers.SGD(1.0)).apply([tf.constant(RANK + 1.0)], [shared])
    np.testing.assert_allclose(float(shared.numpy()), -(SIZE + 1) / 2)


def check_registered_variables_stay_local():
    for wrap in (lambda x: x, lambda x: keras.optimizers.LossScaleOptimizer(x, initial_scale=1.0)):
        own = keras.Variable(0.0)
        optimizer = DistributedOptimizer(wrap(keras.optimizers.SGD(1.0)))
        optimizer.register_local_var(own)
        optimizer.apply([tf.constant(RANK + 1.0, tf.float64)] * 2, [own, keras.Variable(0.0)])
        np.testing.assert_allclose(float(own.numpy()), -(RANK + 1) / SIZE)
