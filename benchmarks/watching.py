"""What it costs to watch a training: steps of fit with a timeline, with callbacks.StepMetrics, and with neither.

    keras-ddl run -np 2 python benchmarks/watching.py [--rounds 15] [--steps 200] [--units 64]

One small network, whose steps are short, so that what is added to each can be told. The contestants take turns:

    bare      without what keras_ddl adds to a step so that it can be watched: the count of the rows of all ranks
    off       as everybody trains: nothing is watched
    timeline  KERAS_DDL_TIMELINE
    metrics   callbacks.StepMetrics, a point every 10 steps

Each line: microseconds of a step on rank 0, the median of the rounds, and the median and quartiles over rounds of its
ratio to `off` in the same round.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import tempfile
import time
from pathlib import Path
from unittest import mock

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
from _rounds import machine

import keras_ddl
from keras_ddl import timeline
from keras_ddl.callbacks import StepMetrics
from keras_ddl.strategy.step.rows_trained import RowsTrained

CONTESTANTS = ("bare", "off", "timeline", "metrics")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--units", type=int, default=64)
    options = parser.parse_args()
    strategy = keras_ddl.Strategy(seed=1)
    rows = 8 * strategy.size
    x = np.ones((options.steps * rows, options.units), "float32")
    models = {}
    for name in CONTESTANTS:
        with strategy.scope():
            layers = [keras.layers.Dense(options.units, activation="relu") for _ in range(3)]
            models[name] = keras.Sequential([keras.Input((options.units,)), *layers, keras.layers.Dense(1)])
            models[name].compile("sgd", "mse")
    times: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds + 1):
            for name in CONTESTANTS[number % 4 :] + CONTESTANTS[: number % 4]:
                seconds = step_seconds(name, models[name], x, rows, Path(folder))
                if number:  # in the first, TensorFlow traces
                    times[name].append(seconds)
    if strategy.rank == 0:
        print(machine())
        for name in CONTESTANTS:
            ratios = [mine / off for mine, off in zip(times[name], times["off"])]
            low, middle, high = statistics.quantiles(ratios, n=4)
            print(f"{name:<9}{1e6 * statistics.median(times[name]):8.0f} us   {middle:.3f} ({low:.3f} to {high:.3f})")


def step_seconds(name: str, model: keras.Model, x: np.ndarray, rows: int, folder: Path) -> float:
    """Returns the seconds of a step of one epoch, without its first."""
    began: list[float] = []

    class Begin(keras.callbacks.Callback):
        never_stops_within_epoch = True

        def on_train_batch_begin(self, batch, logs=None):
            began.append(time.perf_counter())

    watching = [StepMetrics(folder / "metrics")] if name == "metrics" else []
    with contextlib.ExitStack() as stack:
        if name == "bare":
            stack.enter_context(mock.patch.object(RowsTrained, "add", lambda self, counts: None))
        if name == "timeline":
            timeline.start(folder / "timeline.json")
            stack.callback(timeline.stop)
        arguments = {"batch_size": rows, "verbose": 0, "shuffle": False}
        model.fit(x, x[:, :1], callbacks=[Begin(), *watching], **arguments)
    return (began[-1] - began[1]) / (len(began) - 2)


if __name__ == "__main__":
    main()
