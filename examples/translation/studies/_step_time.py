"""Runs one rank of a training that takes turns with other trainings, for trainings.py.

Each rank computes on one core with one thread, so a single rank uses one core of several. Ranks share a core only if
there are more ranks than cores.

Before an epoch, all ranks wait for the file turn-EPOCH of a directory; after it, rank 0 writes epoch-EPOCH.json there.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import time
from pathlib import Path
from typing import Any

import keras

import keras_ddl
from translation.settings import PRESETS
from translation.training import compiled, make_batches, make_subwords

PAUSE = 0.05  # seconds between checks for a turn


class Turns(keras.callbacks.Callback):
    """Waits for its turn before each epoch, and writes the time from the begin of the first batch to the last's end."""

    never_stops_within_epoch = True  # saves the ranks an agreement per batch

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory = directory

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        while not (self.directory / f"turn-{epoch}").exists():
            time.sleep(PAUSE)
        keras_ddl.barrier()  # ranks see the file at different times

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if batch == 0:
            self._begin = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._end, self._steps = time.perf_counter(), batch + 1

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if keras_ddl.rank() == 0:
            parameters = sum(math.prod(weight.shape) for weight in self.model.trainable_weights)
            found = {"seconds": self._end - self._begin, "steps": self._steps, "gradient_bytes": 4 * parameters}
            unfinished = self.directory / "unfinished"
            unfinished.write_text(json.dumps(found))
            unfinished.replace(self.directory / f"epoch-{epoch}.json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="directory of train.en, train.de and the turns")
    parser.add_argument("--model", choices=("lstm", "transformer"), required=True)
    parser.add_argument("--tokens", type=int, required=True, help="tokens in a rank's part of a batch")
    parser.add_argument("--epochs", type=int, required=True)
    options = parser.parse_args()

    keras_ddl.init()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[keras_ddl.rank() % len(cores)]})  # before TensorFlow makes its threads
    settings = dataclasses.replace(PRESETS[options.model], tokens=options.tokens * keras_ddl.size())
    strategy = keras_ddl.Strategy(seed=settings.seed)
    paths = [options.directory / f"train.{language}" for language in ("en", "de")]
    subwords = make_subwords(paths, settings.vocabulary)
    batches = make_batches(paths, subwords, settings)
    with strategy.scope():
        model = compiled(settings, subwords, 1e-4)
    turns = Turns(options.directory)
    model.fit(batches, epochs=options.epochs, shuffle=False, verbose=0, callbacks=[turns])


if __name__ == "__main__":
    main()
