"""Measures the cost of Strategy(reader="rank0") in ms per batch and per MB, compared with reading on every rank.

    keras-ddl run -np 2 python benchmarks/data_from_rank_0.py

The source repeats a batch in memory. Reading it costs nothing, so the program measures the time to split the batch and
send the parts. No model is trained, so this time is not hidden behind steps as it is in fit. Both ways take turns in
one job. The time in which NumPy copies the batch once is a bound: rank 0 copies the other ranks' rows into a message,
the collective moves them, and TensorFlow copies a rank's rows out of the message.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Iterator

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf
from _rounds import machine
from _smoke import options_of

import keras_ddl


def batches_of(strategy: keras_ddl.Strategy, batch: np.ndarray) -> Iterator[tf.Tensor]:
    """Yields this rank's rows, endlessly."""
    return iter(strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensors(batch).repeat()))


def milliseconds(batches: Iterator[tf.Tensor], count: int) -> float:
    """Returns the time of a batch on the slowest rank."""
    keras_ddl.barrier()
    start = time.perf_counter()
    for _ in range(count):
        next(batches)
    return max(keras_ddl.all_gather_object(time.perf_counter() - start)) / count * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", default="0.1,1,8,32", help="sizes of the global batch (default: 0.1,1,8,32)")
    parser.add_argument("--rounds", type=int, default=7, help="turns; medians are reported (default: 7)")
    options = options_of(parser, mb="0.1", rounds=1)
    ways = {"every rank reads": keras_ddl.Strategy(reader="all"), "rank 0 reads": keras_ddl.Strategy(reader="rank0")}
    rank = ways["rank 0 reads"].rank
    if rank == 0:
        print(f"{machine()}; ms per batch, medians of {options.rounds} turns")
    for mb in map(float, options.mb.split(",")):
        batch = np.zeros((64, max(1, int(mb * 1e6 / 4 / 64))), "float32")
        count = max(4, min(200, int(100 / mb)))
        readers = {name: batches_of(strategy, batch) for name, strategy in ways.items()}
        times: dict[str, list[float]] = {name: [] for name in [*ways, "copy"]}
        for _ in range(options.rounds + 1):
            for name, reader in readers.items():
                times[name].append(milliseconds(reader, count))
            target, start = np.empty_like(batch), time.perf_counter()
            np.copyto(target, batch)
            times["copy"].append((time.perf_counter() - start) * 1e3)
        if rank == 0:
            every, first, copy = (statistics.median(turns[1:]) for turns in times.values())
            print(
                f"{mb:6g} MB: every rank reads {every:7.3f}, rank 0 reads {first:7.3f}; extra "
                f"{(first - every) / mb:6.3f} ms per MB, one copy of the batch {copy / mb:6.3f} ms per MB",
                flush=True,
            )
        del readers


if __name__ == "__main__":
    main()
