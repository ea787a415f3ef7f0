"""The time of a training step at 2 ranks beside 1 rank, for networks of 3 and of 25 million parameters.

    keras-ddl run -np 2 python benchmarks/training_step.py

Every rank trains on its own batch of the same size, so a perfect strategy takes as long at any number of ranks as one
rank alone. Three contestants take turns in one run:

    alone        rank 0 trains by itself without a strategy, the other ranks idle
    independent  every rank trains by itself at the same time: what sharing this machine's memory and clock costs
    together     every rank trains under keras_ddl.Strategy

overhead = together - independent: the cost of being one model. speed-up = images per second of all ranks together over
those of one rank alone; it can not exceed (number of ranks) x alone / independent.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
import warnings

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf
from _rounds import machine, slowest_rank

import keras_ddl


def cnn() -> tuple[keras.Model, tuple[int, ...]]:
    """3.3 million parameters (13 MB of gradients), mostly arithmetic."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((32, 32, 3)),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(64, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(800, activation="relu"),
            layers.Dense(10, activation="softmax"),
        ]
    ), (32, 32, 3)


def mlp() -> tuple[keras.Model, tuple[int, ...]]:
    """25.2 million parameters (101 MB of gradients), little arithmetic for each."""
    layers = keras.layers
    return keras.Sequential(
        [keras.Input((2048,))]
        + [layers.Dense(2048, activation="relu") for _ in range(6)]
        + [layers.Dense(10, activation="softmax")]
    ), (2048,)


NETWORKS = {"cnn": (cnn, 64), "mlp": (mlp, 32)}


class StepTimes(keras.callbacks.Callback):
    """Seconds from the start to the end of each step, as the script sees them."""

    def on_train_begin(self, logs=None):
        self.seconds = []

    def on_train_batch_begin(self, batch, logs=None):
        self.start = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        self.seconds.append(time.perf_counter() - self.start)


def compiled(make) -> keras.Model:
    model, _ = make()
    model.compile(keras.optimizers.SGD(0.01), "sparse_categorical_crossentropy")
    return model


def measure(make, batch: int, steps: int, rounds: int, strategy: keras_ddl.Strategy) -> tuple[dict[str, float], int]:
    """Median seconds per step of each contestant, and the number of parameters. COLLECTIVE."""
    size, rank = keras_ddl.size(), keras_ddl.rank()
    alone = compiled(make)
    with strategy.scope():
        together = compiled(make)
    shape = make()[1]
    rng = np.random.default_rng(0)
    x = rng.normal(size=(batch * size, *shape)).astype("float32")
    y = rng.integers(0, 10, size=batch * size)

    def data(rows: slice) -> tf.data.Dataset:
        n = len(x[rows])
        return tf.data.Dataset.from_tensor_slices((x[rows], y[rows])).batch(n).cache().repeat()

    own, everybody = data(slice(rank * batch, (rank + 1) * batch)), data(slice(None))
    times: dict[str, list[float]] = {"alone": [], "independent": [], "together": []}
    for turn in range(rounds + 1):  # the first traces and warms up
        for name, seconds in times.items():
            keras_ddl.barrier()
            watch = StepTimes()
            if name == "together" or name == "independent" or rank == 0:
                model, dataset = (together, everybody) if name == "together" else (alone, own)
                model.fit(dataset, steps_per_epoch=steps, epochs=1, shuffle=False, verbose=0, callbacks=[watch])
            median = slowest_rank(statistics.median(watch.seconds) if name != "alone" or rank == 0 else 0.0)
            if turn:
                seconds.append(median)
    return {name: statistics.median(seconds) for name, seconds in times.items()}, together.count_params()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", default="cnn,mlp", help="which of cnn, mlp (default: both)")
    parser.add_argument("--steps", type=int, default=20, help="steps per turn (default: 20)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contestant (default: 5)")
    parser.add_argument("--threads", type=int, default=1, help="TensorFlow threads per rank (default: 1)")
    options = parser.parse_args()

    tf.config.threading.set_intra_op_parallelism_threads(options.threads)
    tf.config.threading.set_inter_op_parallelism_threads(max(2, options.threads))
    strategy = keras_ddl.Strategy()
    # The contestants without a strategy are meant to train alone.
    warnings.filterwarnings("ignore", "Model .* was made outside the scope")
    first = keras_ddl.rank() == 0
    if first:
        print(f"{machine()}, {options.threads} TensorFlow thread(s) each\n")
        print(
            f"{'network':>8} {'parameters':>11} {'gradients':>10} {'alone':>10} {'independent':>12} {'together':>10} "
            f"{'overhead':>10} {'speed-up':>9} {'possible':>9}",
            flush=True,
        )
    for name in options.networks.split(","):
        make, batch = NETWORKS[name]
        seconds, parameters = measure(make, batch, options.steps, options.rounds, strategy)
        alone, independent, together = seconds["alone"], seconds["independent"], seconds["together"]
        if first:
            size = keras_ddl.size()
            print(
                f"{name:>8} {parameters:>11,} {parameters * 4 / 1e6:>7.1f} MB {alone * 1e3:>7.1f} ms "
                f"{independent * 1e3:>9.1f} ms {together * 1e3:>7.1f} ms {(together - independent) * 1e3:>7.1f} ms "
                f"{size * alone / together:>8.2f}x {size * alone / independent:>8.2f}x",
                flush=True,
            )


if __name__ == "__main__":
    main()
