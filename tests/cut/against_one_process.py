"""Compares the results of ranks with those of one process."""

import numpy as np

import keras_ddl
from keras_ddl.compat.tensorflow import tf
from strategy.common import RANK


def expected(loop, data):
    """Runs `loop` with tf.function on rank 0 and returns its results on all ranks."""
    found = loop(tf.function, data) if RANK == 0 else None
    return keras_ddl.broadcast_object(found, name="test/expected")


def assert_same(found, one, tolerance=1e-13):
    assert len(found) == len(one)
    for mine, theirs in zip(found, one):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=tolerance)
    bits = keras_ddl.all_gather_object([np.asarray(each).tobytes() for each in found], name="test/bits")
    assert all(each == bits[0] for each in bits), "ranks differ in some bit"
