"""Measures how much longer a step takes when it saves a checkpoint, compared with a memcpy of the checkpoint's bytes.

    keras-ddl run -np 2 python benchmarks/checkpoint_step.py [--optimizer adam] [--directory /a/disk]

A network of about 25 million parameters trains under keras_ddl.Strategy with `callbacks.Checkpoint(save_freq=...)`. A
step lasts from its first callback to the first callback of the next step, on rank 0.

    memcpy     one thread copies the bytes of weights and optimizer state between two touched arrays, between the
               checkpoints of the same run
    step       a step that takes a checkpoint, minus the median of the steps before it, over memcpy. The goal: 1.05
    hook       the time in the callback alone, over memcpy: the same without the noise of the steps
    beside     a step during which the thread copies and writes, over a step without that: the slowdown of training
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
from _rounds import machine
from _smoke import options_of

import keras_ddl
from keras_ddl import callbacks


class Times(keras.callbacks.Callback):
    """Records when each step begins, and runs a memcpy in some steps."""

    never_stops_within_epoch = True

    def __init__(self, every: int, sizes: list[int]):
        super().__init__()
        self.every, self.steps, self.began = every, 0, []
        self.pairs = [(np.ones(size, np.uint8), np.ones(size, np.uint8)) for size in sizes]
        self.copies: list[float] = []
        self.with_memcpy: set[int] = set()  # steps

    def on_train_batch_begin(self, batch, logs=None):
        self.began.append(time.perf_counter())
        if self.steps % self.every == self.every - 4 and keras_ddl.rank() == 0:
            self.with_memcpy.add(self.steps)
            start = time.perf_counter()
            for source, target in self.pairs:
                np.copyto(target, source)
            self.copies.append(time.perf_counter() - start)
        self.steps += 1


class Timed(callbacks.Checkpoint):
    """A Checkpoint that records in which steps it was busy, and for how long."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.taken: dict[int, float] = {}
        self.writing: set[int] = set()
        self.number = -1

    def on_train_batch_begin(self, batch, logs=None):
        self.number += 1
        super().on_train_batch_begin(batch, logs)
        if self._in_flight:
            self.writing.add(self.number)

    def on_train_batch_end(self, batch, logs=None):
        before, start = self._saved, time.perf_counter()
        super().on_train_batch_end(batch, logs)
        if self._saved != before:
            self.taken[self.number] = time.perf_counter() - start


def train(arguments: argparse.Namespace, directory: str) -> tuple[Times, Timed, int]:
    strategy = keras_ddl.Strategy(seed=1)
    width = round((arguments.parameters / arguments.layers) ** 0.5)
    with strategy.scope():
        layers = [keras.layers.Dense(width, activation="relu") for _ in range(arguments.layers)]
        model = keras.Sequential([keras.Input((width,)), *layers])
        model.compile(keras.optimizers.get(arguments.optimizer), "mse")
        model.optimizer.build(model.trainable_variables)
    variables = [*model.variables, *model.optimizer.variables]
    sizes = [int(np.prod(v.shape)) * np.dtype(v.dtype).itemsize for v in variables]
    times = Times(arguments.every, sizes)
    checkpoint = Timed(directory, monitor="loss", export_base=False, keep=1, save_best=False, save_freq=arguments.every)
    steps = arguments.every * (arguments.checkpoints + 1) + 2
    rows = np.random.default_rng(0).normal(size=(arguments.batch, width)).astype(np.float32)
    data = (rows, rows)
    model.fit(
        *(np.repeat(each[np.newaxis], steps, axis=0).reshape(-1, width) for each in data),
        batch_size=arguments.batch,
        shuffle=False,
        verbose=0,
        callbacks=[times, checkpoint],
    )
    return times, checkpoint, sum(sizes)


def report(times: Times, checkpoint: Timed, num_bytes: int) -> None:
    lasted = np.diff(times.began)
    taken = [step for step in sorted(checkpoint.taken) if step < len(lasted)][1:]  # the first warms up the files
    idle = [
        step
        for step in range(len(lasted))
        if step > 5 and not any(step in busy for busy in (checkpoint.taken, checkpoint.writing, times.with_memcpy))
    ]
    memcpy = statistics.median(times.copies)
    extra = []
    for step in taken:
        before = [lasted[one] for one in idle if step - 12 <= one < step] or [lasted[one] for one in idle]
        extra.append(lasted[step] - statistics.median(before))
    hooks = [checkpoint.taken[step] for step in taken]
    writing = [lasted[step] for step in checkpoint.writing if step < len(lasted) and step not in times.with_memcpy]
    ordinary = statistics.median(lasted[step] for step in idle)
    print(f"{machine()}; {num_bytes / 1e6:.0f} MB, {len(taken)} checkpoints")
    print(f"step without    {ordinary * 1e3:8.1f} ms   ({len(idle)} steps)")
    print(f"memcpy          {memcpy * 1e3:8.1f} ms   ({num_bytes / memcpy / 1e9:.1f} GB/s)")
    print(f"step / memcpy   {statistics.median(extra) / memcpy:8.2f}      (goal: at most 1.05)")
    print(f"hook / memcpy   {statistics.median(hooks) / memcpy:8.2f}      (least {min(hooks) / memcpy:.2f})")
    print(f"beside / idle   {statistics.median(writing) / ordinary:8.2f}      ({len(writing)} steps)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=25e6)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--batch", type=int, default=16, help="rows of the global batch")
    parser.add_argument("--optimizer", default="sgd")
    parser.add_argument("--every", type=int, default=40, help="steps from one checkpoint to the next")
    parser.add_argument("--checkpoints", type=int, default=12)
    parser.add_argument("--directory", help="where to write; default: a temporary directory")
    arguments = options_of(parser, parameters=1e4, layers=1, every=8, checkpoints=3)
    with tempfile.TemporaryDirectory(dir=arguments.directory) as own:
        keras_ddl.init()
        times, checkpoint, num_bytes = train(arguments, keras_ddl.broadcast_object(own, name="directory"))
        if keras_ddl.rank() == 0:
            report(times, checkpoint, num_bytes)
        keras_ddl.barrier(name="written")


if __name__ == "__main__":
    main()
