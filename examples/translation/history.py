"""Records and draws the speed, loss, BLEU and exact match of each epoch."""

from __future__ import annotations

import csv
import time
from pathlib import Path
from typing import Any

import keras

from translation.batches import Batches


class Speed(keras.callbacks.Callback):
    """Puts `tokens_per_second` into each epoch's logs: subwords of source and target on all ranks, without padding.

    Validation and other callbacks at the end of an epoch do not count. Put it before callbacks that read logs.
    """

    never_stops_within_epoch = True  # spares the ranks an agreement in every batch

    def __init__(self, batches: Batches) -> None:
        super().__init__()
        self.tokens_per_batch = batches.plan.lengths.sum() / len(batches)  # on average
        self._begin = self._end = 0.0
        self._batches = 0

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._begin, self._batches = time.perf_counter(), 0

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._batches += 1  # in a resumed epoch, only the batches since it was resumed

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._end = time.perf_counter()  # the batches of the epoch are over

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        logs["tokens_per_second"] = self._batches * self.tokens_per_batch / (self._end - self._begin)


def read(history: str | Path) -> dict[str, list[float]]:
    """Returns column -> values of a file of keras.callbacks.CSVLogger; for a repeated epoch, the last values."""
    with Path(history).open() as file:
        rows = list({row["epoch"]: row for row in csv.DictReader(file)}.values())
    return {name: [float(row[name]) for row in rows] for name in rows[0]}


def draw(figure: Any, columns: dict[str, list[float]]) -> None:
    """Draws loss and scores over the epochs into a matplotlib figure."""
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
    """Draws the history that CSVLogger wrote, and saves the picture. Needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    draw(figure, read(history))
    figure.savefig(picture, dpi=150)
