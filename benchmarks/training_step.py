"""Measures the overhead of a training step at 2 ranks, compared with a third of Horovod's recorded overhead.

    keras-ddl run -np 2 python benchmarks/training_step.py
    KERAS_DDL_TIMELINE=/tmp/step.json keras-ddl run -np 2 python benchmarks/training_step.py --networks resnet

Every rank trains on its own batch of the same size, so a perfect strategy takes as long at any number of ranks as one
rank alone. Contestants take turns in one run:

    alone        rank 0 trains without a strategy, while the other ranks are idle
    independent  every rank trains alone at the same time, sharing this machine's memory and clock
    in step      independent, but ranks read the strategy's data (whole global batches, of which each keeps its rows)
                 and wait for each other after every step
    together     every rank trains under keras_ddl.Strategy

overhead = together - independent, the cost of training one model together. A third of Horovod's overhead is printed for
comparison: recorded elsewhere (HOROVOD_MS), not measured in this run. floor = in step - independent, the overhead
without any communication: ranks that wait for each other take the longest of their steps' times, which differ on any
machine. speed-up = images per second of all ranks together over those of one rank alone; it cannot exceed (number of
ranks) x alone / independent. on wire = bytes of gradients that were reduced while the backward pass still ran; ready =
bytes that the backward pass had made by then.

--processor shows where the overhead goes: the time that a rank's communication threads run in a step, that its other
threads run under the strategy and independently, and for which threads were ready but had no core.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import warnings

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf
from _processor import Processor
from _rounds import machine, slowest_rank
from _smoke import options_of

import keras_ddl
from keras_ddl.bench.training.networks import NETWORKS, Network
from keras_ddl.bench.training.overlap import Traffic, watched
from keras_ddl.bench.training.step_times import StepTimes
from keras_ddl.data import share_dataset

# Milliseconds of overhead of Horovod 0.28.1 on TensorFlow 2.15 and Keras 2 at 2 ranks, one core each, recorded once on
# a machine like the one of benchmarks/results/training_step.md: Horovod does not run on this TensorFlow and Keras.
HOROVOD_MS = {"cnn": 6.3, "mlp": 52.0, "resnet": 63.0, "lstm": 25.0}
CONTESTANTS = ("alone", "independent", "in step", "together")


def compiled(network: Network) -> keras.Model:
    model = network.make()
    model.compile(keras.optimizers.SGD(0.01), "sparse_categorical_crossentropy")
    return model


def batches(x: np.ndarray, y: np.ndarray) -> tf.data.Dataset:
    """Returns a dataset that repeats one batch, all of `x` and `y`."""
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(len(x)).cache().repeat()


def measure(
    network: Network, steps: int, rounds: int, strategy: keras_ddl.Strategy
) -> tuple[dict[str, float], dict[str, Processor], Traffic | None]:
    """Returns (median seconds by contestant, and other numbers; processor times; traffic). COLLECTIVE."""
    size, rank, batch = keras_ddl.size(), keras_ddl.rank(), network.batch
    alone = compiled(network)
    with strategy.scope():
        together = compiled(network)
    x, y = network.rows(batch * size)
    own = batches(x[rank * batch : (rank + 1) * batch], y[rank * batch : (rank + 1) * batch])
    everybody = batches(x, y)
    shared = share_dataset(everybody, rank, size)

    def train(name: str) -> list[float]:
        watch = StepTimes(meet=name == "in step")
        model = together if name == "together" else alone
        dataset = {"in step": shared, "together": everybody}.get(name, own)
        model.fit(dataset, steps_per_epoch=steps, epochs=1, shuffle=False, verbose=0, callbacks=[watch])
        return watch.seconds

    times: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    taken: dict[str, list[Processor]] = {name: [] for name in CONTESTANTS}
    for turn in range(rounds + 1):  # the first traces and warms up
        for name, seconds in times.items():
            keras_ddl.barrier()
            before = Processor.now()
            median = slowest_rank(statistics.median(train(name)) if name != "alone" or rank == 0 else 0.0)
            if turn:
                seconds.append(median)
                taken[name].append(Processor.now().since(before, steps))
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    # The differences are between times of one round, because the machine's speed drifts between rounds.
    for name, contestant in (("overhead", "together"), ("floor", "in step")):
        pairs = zip(times[contestant], times["independent"])
        medians[name] = statistics.median(one - other for one, other in pairs)
    medians["parameters"] = together.count_params()
    ranks = keras_ddl.all_gather_object(taken)
    processor = {
        name: Processor(*(statistics.median(each) for each in zip(*(one for rank in ranks for one in rank[name]))))
        for name in CONTESTANTS
    }
    return medians, processor, watched(lambda: train("together"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ",".join(NETWORKS)
    parser.add_argument("--networks", default=names, help=f"which of {names} (default: all)")
    parser.add_argument("--steps", type=int, default=12, help="steps per turn (default: 12)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contestant (default: 5)")
    parser.add_argument(
        "--threads",
        type=int,
        default=1,
        help="TensorFlow threads per rank, within and between operations; 0: the Strategy's choice (default: 1, so "
        "that a rank alone does not use the others' cores)",
    )
    parser.add_argument("--batch", type=int, default=None, help="rows of each rank (default: the network's)")
    parser.add_argument("--batch-statistics", default="global", help="as for keras_ddl.Strategy (default: %(default)s)")
    parser.add_argument("--processor", action="store_true", help="also show the processor time of a rank's threads")
    options = options_of(parser, networks="cnn", steps=2, rounds=1, threads=0, batch=2)

    if options.threads:
        tf.config.threading.set_intra_op_parallelism_threads(options.threads)
        tf.config.threading.set_inter_op_parallelism_threads(options.threads)
    strategy = keras_ddl.Strategy(batch_statistics=options.batch_statistics)
    # The contestants without a strategy are meant to train alone.
    warnings.filterwarnings("ignore", "Model .* was made outside the scope")
    first, size = keras_ddl.rank() == 0, keras_ddl.size()
    if first:
        within, between = (
            getattr(tf.config.threading, f"get_{pool}_op_parallelism_threads")() for pool in ("intra", "inter")
        )
        print(f"{machine()}, {within} TensorFlow thread(s) within and {between} between operations of each.")
        print(
            "Milliseconds per step. Horovod/3: a third of an overhead recorded elsewhere, not measured in this run.\n"
        )
        print(
            f"{'network':>8} {'gradients':>10} {'alone':>7} {'indep.':>7} {'in step':>7} {'together':>8} "
            f"{'overhead':>8} {'floor':>6} {'Horovod/3':>9} {'speed-up':>8} {'possible':>8} "
            f"{'on wire':>7} {'ready':>6}",
            flush=True,
        )
    for name in options.networks.split(","):
        network = NETWORKS[name]
        if options.batch:
            network = dataclasses.replace(network, batch=options.batch)
        seconds, processor, traffic = measure(network, options.steps, options.rounds, strategy)
        alone, independent, in_step, together = (1e3 * seconds[one] for one in CONTESTANTS)
        if first:
            shares = [f"{share:.0%}" for share in (traffic.wire, traffic.ready)] if traffic else ["-", "-"]
            print(
                f"{name:>8} {seconds['parameters'] * 4 / 1e6:>7.1f} MB {alone:>7.1f} {independent:>7.1f} "
                f"{in_step:>7.1f} {together:>8.1f} {1e3 * seconds['overhead']:>8.1f} "
                f"{1e3 * seconds['floor']:>6.1f} {HOROVOD_MS[name] / 3:>9.1f} "
                f"{size * alone / together:>7.2f}x {size * alone / independent:>7.2f}x "
                f"{shares[0]:>7} {shares[1]:>6}",
                flush=True,
            )
        if first and options.processor:
            for contestant in ("independent", "in step", "together"):
                communication, others, queued = (1e3 * each for each in processor[contestant])
                print(
                    f"{contestant:>22}: communication {communication:.1f}, other threads {others:.1f}, "
                    f"ready without a core {queued:.1f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
