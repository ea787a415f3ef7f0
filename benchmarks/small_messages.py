"""Measures how much a small all-reduce adds to a tf.function: compares calls with and without one all_reduce of 1 KB.

    keras-ddl run -np 2 python benchmarks/small_messages.py
    keras-ddl run -np 2 --mpirun mpirun python benchmarks/small_messages.py --mpi

Both functions take turns of some hundred calls. The program reports medians over the turns of the slowest rank's median
call, and their difference, the cost of one small collective. "floor" is a call without the all_reduce after which the
ranks only meet outside TensorFlow. Meeting alone ("rendezvous") takes microseconds, so the floor is about the time lost
by waiting for the slower rank. --mpi adds MPI_Allreduce on a NumPy array, without TensorFlow, for comparison.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf
from _rounds import machine, slowest_rank
from _smoke import options_of

import keras_ddl
from keras_ddl.communicator import all_reduce_init


def median_call(function, calls: int) -> float:
    """Returns the median seconds of a call."""
    seconds = []
    for _ in range(calls):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=int, default=1024, help="bytes of the reduced tensor (default: 1024)")
    parser.add_argument("--turns", type=int, default=15, help="turns of each function (default: 15)")
    parser.add_argument("--calls", type=int, default=400, help="calls per turn (default: 400)")
    parser.add_argument("--mpi", action="store_true", help="also time MPI_Allreduce")
    options = options_of(parser, turns=1, calls=5)

    keras_ddl.init()
    values = tf.ones([options.bytes // 4])

    @tf.function
    def empty(tensor):
        return tf.identity(tensor)

    @tf.function
    def reduced(tensor):
        return keras_ddl.all_reduce(tensor, name="small")

    meet = all_reduce_init(np.ones(1), "sum", "rendezvous", out=np.zeros(1))

    def floor() -> None:
        empty(values)
        meet()

    contestants = {"empty": lambda: empty(values), "rendezvous": meet, "floor": floor}
    contestants["all_reduce"] = lambda: reduced(values)
    if options.mpi:
        from mpi4py import MPI

        source = np.ones(options.bytes // 4, np.float32)
        result = np.zeros_like(source)
        contestants["MPI_Allreduce"] = lambda: MPI.COMM_WORLD.Allreduce(source, result)
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(options.turns + 1):  # the first traces and warms up
        for name, call in contestants.items():
            keras_ddl.barrier()
            seconds = slowest_rank(median_call(call, options.calls))
            if turn:
                times[name].append(seconds)
    if keras_ddl.rank() == 0:
        median = {name: statistics.median(seconds) * 1e6 for name, seconds in times.items()}

        def added(name: str) -> float:
            return statistics.median(a - b for a, b in zip(times[name], times["empty"])) * 1e6

        print(f"{machine()}; {options.bytes} bytes\n")
        for name, microseconds in median.items():
            print(f"{name:>14} {microseconds:8.1f} us")
        print(f"{'added':>14} {added('all_reduce'):8.1f} us by one all_reduce in a tf.function")
        print(f"{'':>14} {added('floor'):8.1f} us by waiting for the other ranks alone")


if __name__ == "__main__":
    main()
