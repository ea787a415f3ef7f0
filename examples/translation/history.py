"""The curve of a training: loss, BLEU and exact match of each epoch, as a picture."""

from __future__ import annotations

import csv
from pathlib import Path


def draw(history: str | Path, picture: str | Path) -> None:
    """Draws what keras.callbacks.CSVLogger has written. Needs matplotlib."""
    from matplotlib.figure import Figure

    with Path(history).open() as file:
        rows = list(csv.DictReader(file))
    epochs = [int(row["epoch"]) + 1 for row in rows]
    figure = Figure(figsize=(8, 4), layout="constrained")
    loss, score = figure.subplots(1, 2)
    for name, label in (("loss", "training"), ("val_loss", "held out")):
        loss.plot(epochs, [float(row[name]) for row in rows], marker=".", label=label)
    for name, label, scale in (("bleu", "BLEU", 1), ("exact", "exact match, %", 100)):
        score.plot(epochs, [scale * float(row[name]) for row in rows], marker=".", label=label)
    loss.set(xlabel="epoch", ylabel="loss, nats a token")
    score.set(xlabel="epoch", ylim=(0, 100))
    for axes in (loss, score):
        axes.legend()
    figure.savefig(picture, dpi=150)
