"""A custom algorithm on the collectives: k-means on data that is split between the ranks.

    keras-ddl run -np 2 python examples/own_collective.py

One `all_reduce_n` per iteration, inside a `tf.function`, adds up the ranks' sums; no rank sees another rank's data.
Rank 0 compares the result with NumPy on all data.
"""

from __future__ import annotations

import argparse

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import keras_ddl


@tf.function
def improve(rows: tf.Tensor, centers: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns new centers [k, d] and the sum of squared distances, over all ranks' rows; `rows`: this rank's [n, d]."""
    distances = tf.reduce_sum((rows[:, None] - centers) ** 2, axis=2)
    nearest = tf.argmin(distances, axis=1)
    k = tf.shape(centers)[0]
    sums, counts, inertia = keras_ddl.all_reduce_n(
        [
            tf.math.unsorted_segment_sum(rows, nearest, k),
            tf.math.unsorted_segment_sum(tf.ones_like(nearest), nearest, k),
            tf.reduce_sum(tf.reduce_min(distances, axis=1)),
        ]
    )
    means = sums / tf.cast(tf.maximum(counts, 1), rows.dtype)[:, None]
    return tf.where((counts > 0)[:, None], means, centers), inertia


def with_numpy(rows: np.ndarray, centers: np.ndarray, iterations: int) -> np.ndarray:
    for _ in range(iterations):
        nearest = np.argmin(((rows[:, None] - centers) ** 2).sum(axis=2), axis=1)
        centers = np.array(
            [rows[nearest == k].mean(axis=0) if (nearest == k).any() else c for k, c in enumerate(centers)]
        )
    return centers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clusters", type=int, default=10)
    parser.add_argument("--iterations", type=int, default=20)
    arguments = parser.parse_args()

    keras_ddl.init()
    rank, size = keras_ddl.rank(), keras_ddl.size()
    rows = load_digits().data.astype(np.float64)
    mine = rows[rank::size]
    start = rows[np.random.default_rng(0).choice(len(rows), arguments.clusters, replace=False)]

    centers = keras_ddl.broadcast(tf.constant(start))  # all ranks begin with rank 0's choice
    for iteration in range(arguments.iterations):
        centers, inertia = improve(tf.constant(mine), centers)
        if rank == 0 and iteration % 5 == 0:
            print(f"iteration {iteration}: sum of squared distances {float(inertia):.1f}")

    everyone = keras_ddl.all_gather(tf.argmin(tf.reduce_sum((mine[:, None] - centers) ** 2, axis=2), axis=1))
    if rank == 0:
        difference = np.abs(centers.numpy() - with_numpy(rows, start, arguments.iterations)).max()
        print(f"{len(everyone)} rows in clusters of {np.bincount(everyone, minlength=arguments.clusters).tolist()}")
        print(f"largest difference from NumPy on all rows: {difference:.1e}")
        assert difference < 1e-9, "the ranks did not compute what one process would have"


if __name__ == "__main__":
    main()
