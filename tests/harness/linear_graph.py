"""A linear model in a graph of tf.compat.v1, of which each rank has its rows: for check programs of ddl and Horovod."""

import contextlib

import numpy as np
import tensorflow.compat.v1 as tf

import keras_ddl

keras_ddl.init()
RANK, SIZE = keras_ddl.rank(), keras_ddl.size()
X = np.random.default_rng(3).normal(size=(12, 3)).astype(np.float32)
Y = X @ np.float32([[1.0], [-2.0], [0.5]])
ROWS = slice(RANK * 12 // SIZE, (RANK + 1) * 12 // SIZE)  # equally many on 2 and on 3 ranks


def start(rank: int) -> np.ndarray:
    return np.random.default_rng(rank).normal(size=(3, 1)).astype(np.float32)


@contextlib.contextmanager
def graph():
    with tf.Graph().as_default(), tf.Session() as session:
        yield session


def linear(**kwargs):
    """A linear model of this rank's rows, from a start of this rank's own: (weights, loss)."""
    w = tf.Variable(start(RANK), name="w", **kwargs)
    return w, tf.reduce_mean(tf.square(tf.matmul(tf.constant(X[ROWS]), w) - Y[ROWS]))


def gradient(w: np.ndarray) -> np.ndarray:
    """Of all rows, by NumPy."""
    return 2 * X.T @ (X @ w - Y) / len(X)


def everywhere(value):
    """The value of this rank, after it was compared with those of the others, bit by bit."""
    values = keras_ddl.all_gather_object(np.asarray(value))
    for other in values[1:]:
        np.testing.assert_array_equal(other, values[0])
    return values[0]
