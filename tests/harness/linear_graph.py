"""A linear model in a tf.compat.v1 graph, with different rows on each rank, for check programs of ddl and Horovod."""

import contextlib

import numpy as np
import tensorflow.compat.v1 as tf

import keras_ddl

keras_ddl.init()
RANK, SIZE = keras_ddl.rank(), keras_ddl.size()
X = np.random.default_rng(3).normal(size=(12, 3)).astype(np.float32)
Y = X @ np.float32([[1.0], [-2.0], [0.5]])
ROWS = slice(RANK * 12 // SIZE, (RANK + 1) * 12 // SIZE)  # equal numbers on 2 and on 3 ranks


def start(rank: int) -> np.ndarray:
    return np.random.default_rng(rank).normal(size=(3, 1)).astype(np.float32)


@contextlib.contextmanager
def graph():
    with tf.Graph().as_default(), tf.Session() as session:
        yield session


def linear(**kwargs):
    """Returns (weights, loss) of a linear model of this rank's rows that starts from values of this rank."""
    w = tf.Variable(start(RANK), name="w", **kwargs)
    return w, tf.reduce_mean(tf.square(tf.matmul(tf.constant(X[ROWS]), w) - Y[ROWS]))


def gradient(w: np.ndarray) -> np.ndarray:
    """Computes the gradient over all rows with NumPy."""
    return 2 * X.T @ (X @ w - Y) / len(X)


def everywhere(value):
    """Returns this rank's value after comparing it with the others' bit by bit."""
    values = keras_ddl.all_gather_object(np.asarray(value))
    for other in values[1:]:
        np.testing.assert_array_equal(other, values[0])
    return values[0]
