"""Measures the cost of exactness: compares steps of `fit` under the Strategy with steps that only average gradients.

    keras-ddl run -np 2 python benchmarks/exactness.py

Contestants take turns in one run. They read whole batches, and each rank keeps its rows:

    bare    a train_step outside of any Strategy that averages the ranks' gradients in the same buckets and applies
            them, as any data-parallel training must
    exact   plain `fit` under keras_ddl.Strategy: one process's step split between the ranks (docs/cut.md), with rows
            counted, the order of the data and the weights compared, and losses and metrics of the whole batch

Both train a network of 25 million parameters by default. cost = exact - bare, for measurements that directly follow
each other; the goal is at most 5 % of a step of `bare`. per epoch = the time of an epoch outside of its steps. One more
epoch of each contestant is recorded as a timeline to count its collectives.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import warnings
from collections import Counter
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import tensorflow as tf
from _rounds import machine, slowest_rank
from _smoke import options_of

import keras_ddl
from keras_ddl import timeline
from keras_ddl.bench.training.networks import NETWORKS
from keras_ddl.bench.training.step_times import StepTimes
from keras_ddl.data import share_dataset
from keras_ddl.gradients import buckets

CONTESTANTS = ("bare", "exact")


def bare_model(network: keras.Model, bucket_size: object) -> keras.Model:
    """Returns the network with a train_step that averages gradients and otherwise does what one rank would do."""

    class Bare(keras.Model):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = self._compute_loss(x, y, self(x, training=True), training=True)
            gradients = tape.gradient(loss, self.trainable_variables)
            gradients = buckets.all_reduce_in_buckets(gradients, op="mean", name="bare", bucket_size=bucket_size)
            self.optimizer.apply(gradients, self.trainable_variables)
            self._loss_tracker.update_state(loss)
            return {"loss": self._loss_tracker.result()}

    return Bare(network.inputs, network.outputs)


def collectives(train: object) -> Counter:
    """Returns how often each collective ran in an epoch, by name without numbers."""
    with tempfile.TemporaryDirectory() as folder:
        path = timeline.start(Path(folder, "epoch.json"))
        try:
            train()
        finally:
            timeline.stop()
        return Counter(one.name for one in timeline.collectives(path))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", default="mlp", choices=NETWORKS, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=12, help="steps per epoch (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="epochs of each contestant (default: %(default)s)")
    parser.add_argument(
        "--threads", type=int, default=1, help="TensorFlow threads per rank; 0: its own choice (%(default)s)"
    )
    options = options_of(parser, network="cnn", steps=2, rounds=1, threads=0)

    if options.threads:
        tf.config.threading.set_intra_op_parallelism_threads(options.threads)
        tf.config.threading.set_inter_op_parallelism_threads(max(2, options.threads))
    strategy = keras_ddl.Strategy()
    warnings.filterwarnings("ignore", "Model .* was made outside the scope")
    rank, size = keras_ddl.rank(), keras_ddl.size()
    network = NETWORKS[options.network]
    x, y = network.rows(network.batch * size)
    whole = tf.data.Dataset.from_tensor_slices((x, y)).batch(len(x)).cache().repeat()

    models = {"bare": bare_model(network.make(), strategy.extended.bucket_size)}
    with strategy.scope():
        models["exact"] = network.make()
    for model in models.values():
        model.compile("sgd", "sparse_categorical_crossentropy")
    data = {"bare": share_dataset(whole, rank, size), "exact": whole}

    def train(name: str) -> StepTimes:
        watch = StepTimes()
        models[name].fit(
            data[name], steps_per_epoch=options.steps, epochs=1, shuffle=False, verbose=0, callbacks=[watch]
        )
        return watch

    steps: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    rest: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    for turn in range(options.rounds + 1):  # the first round traces and warms up
        for name in CONTESTANTS if turn % 2 else CONTESTANTS[::-1]:
            keras_ddl.barrier()
            watch = train(name)
            step = slowest_rank(statistics.median(watch.seconds))
            beyond = slowest_rank(watch.epoch - sum(watch.seconds))
            if turn:
                steps[name].append(step)
                rest[name].append(beyond)
    counts = {name: collectives(lambda name=name: train(name)) for name in CONTESTANTS}
    if rank:
        return
    bare, exact = (statistics.median(steps[name]) for name in CONTESTANTS)
    cost = statistics.median(one - other for one, other in zip(steps["exact"], steps["bare"]))
    print(f"{machine()}, {options.threads} TensorFlow thread(s) within operations of each of {size} ranks.")
    parameters = models["exact"].count_params()
    print(f"{options.network}: {parameters / 1e6:.1f} million parameters, {network.batch} rows per rank and step\n")
    print(f"ms per step: bare {1e3 * bare:.2f}, exact {1e3 * exact:.2f}, cost {1e3 * cost:.2f} = {cost / bare:.1%}")
    per_epoch = statistics.median(one - other for one, other in zip(rest["exact"], rest["bare"]))
    print(f"ms per epoch beyond the steps: {1e3 * per_epoch:.2f} more than bare\n")
    for name in CONTESTANTS:
        in_steps = {key: n / options.steps for key, n in counts[name].items() if n >= options.steps}
        once = {key: n for key, n in counts[name].items() if n < options.steps}
        print(f"{name}: {sum(in_steps.values()):g} collectives a step, {sum(once.values())} around an epoch")
        for key, n in {**in_steps, **once}.items():
            print(f"    {n:g} x {key}")


if __name__ == "__main__":
    main()
