"""The curve of a training: speed, loss, BLEU and exact match of each epoch."""

from __future__ import annotations

import csv
import time
from pathlib import Path
from typing import Any

import keras

from translation.batches import Batches


class Speed(keras.callbacks.Callback):
    """Puts `tokens_per_second` into the logs of each epoch: subwords of source and target, of all ranks, no padding.

    Validation does not count, nor what other callbacks do at the end of an epoch. Put it before what reads logs.
    """

    never_stops_within_epoch = True  # spares the ranks an agreement in every batch

    def __init__(self, batches: Batches) -> None:
        super().__init__()
        self.tokens_of_batch = batches.plan.lengths.sum() / len(batches)  # on an average
        self._begin = self._end = 0.0
        self._batches = 0

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._begin, self._batches = time.perf_counter(), 0

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._batches += 1  # of an epoch that is gone on with, only those from there on

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._end = time.perf_counter()  # the batches of the epoch are over

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        logs["tokens_per_second"] = self._batches * self.tokens_of_batch / (self._end - self._begin)


def read(history: str | Path) -> dict[str, list[float]]:
    """Returns what keras.callbacks.CSVLogger has written, by column. Of an epoch that was begun again, the last."""
    with Path(history).open() as file:
        rows = list({row["epoch"]: row for row in csv.DictReader(file)}.values())
    return {name: [float(row[name]) for row in rows] for name in rows[0]}


def draw(figure: Any, columns: dict[str, list[float]]) -> None:
    """Draws loss and scores over the epochs into a figure of matplotlib."""
    epochs = [epoch + 1 for epoch in columns["epoch"]]
    loss, score = figure.subplots(1, 2)
    loss.plot(epochs, columns["loss"], marker=".", label="training")
    loss.plot(epochs, columns["val_loss"], marker=".", label="held out")
    score.plot(epochs, columns["bleu"], marker=".", label="BLEU")
    score.plot(epochs, [100 * value for value in columns["exact"]], marker=".", label="exact match, %")
    loss.set(xlabel="epoch", ylabel="loss, nats a token")
    score.set(xlabel="epoch", ylim=(0, 102))
    for axes in (loss, score):
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.legend()


def save_picture(history: str | Path, picture: str | Path) -> None:
    """Draws what CSVLogger has written into a file. Needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    draw(figure, read(history))
    figure.savefig(picture, dpi=150)
