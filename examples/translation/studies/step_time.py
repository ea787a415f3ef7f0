"""What one training takes: this is a rank of it. trainings.py starts it, here and in the emulated cluster.

    keras-ddl run -np 2 python -m translation.studies.step_time CORPUS --model lstm --tokens 1024 --output FILE

Each rank computes on one core with one thread, so that a rank alone is one device of several: two ranks share a core
only where there are more ranks than cores.
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


class Epochs(keras.callbacks.Callback):
    """`seconds` of each epoch, from the beginning of its first batch to the end of its last."""

    never_stops_within_epoch = True  # spares the ranks an agreement in every batch

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if batch == 0:
            self._begin = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._end = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.seconds.append(self._end - self._begin)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path, help="directory of train.en and train.de")
    parser.add_argument("--model", choices=("lstm", "transformer"), default="lstm")
    parser.add_argument("--tokens", type=int, default=1024, help="of a rank's part of a batch")
    parser.add_argument("--epochs", type=int, default=2, help="to measure; one more, which traces, goes before them")
    parser.add_argument("--output", type=Path, required=True, help="of rank 0: JSON")
    options = parser.parse_args()

    keras_ddl.init()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[keras_ddl.rank() % len(cores)]})  # before TensorFlow makes its threads
    settings = dataclasses.replace(PRESETS[options.model], tokens=options.tokens * keras_ddl.size())
    strategy = keras_ddl.Strategy(seed=settings.seed)
    paths = [options.corpus / f"train.{language}" for language in ("en", "de")]
    subwords = make_subwords(paths, settings.vocabulary)
    batches = make_batches(paths, subwords, settings)
    with strategy.scope():
        model = compiled(settings, subwords, 1e-4)
    epochs = Epochs()
    model.fit(batches, epochs=1 + options.epochs, shuffle=False, verbose=0, callbacks=[epochs])
    if keras_ddl.rank() == 0:
        parameters = sum(math.prod(weight.shape) for weight in model.trainable_weights)
        found = {"seconds": epochs.seconds[1:], "steps": len(batches), "gradient_bytes": 4 * parameters}
        options.output.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
