"""Metrics whose result is not a mean over batches."""

from __future__ import annotations

import keras
import numpy as np

from _scoreboard.peers import Peer
from _scoreboard.programs.common import LABELS, Values, dense, program, train

ONE_HOT = (np.arange(3) == LABELS[:, None]).astype("float64")


@program("AUC", of_logs=True, tolerance=1e-6)  # Keras adds up counts in float32
def auc(peer: Peer) -> Values:
    def build() -> keras.Model:
        return dense(outputs=1, activation="sigmoid")

    y = (LABELS == 1).astype("float64")[:, None]
    metrics = {"metrics": lambda: [keras.metrics.AUC(num_thresholds=50, name="auc")]}
    return train(peer, build, y=y, loss="binary_crossentropy", rows=46, **metrics)


@program("F1 and mean IoU", of_logs=True, tolerance=1e-6)
def f1_and_iou(peer: Peer) -> Values:
    def build() -> keras.Model:
        return dense(outputs=3, activation="softmax")

    def metrics() -> list[keras.metrics.Metric]:
        iou = keras.metrics.OneHotMeanIoU(num_classes=3, name="iou")
        return [keras.metrics.F1Score(average="macro", name="f1"), iou]

    return train(peer, build, y=ONE_HOT, loss="categorical_crossentropy", rows=46, metrics=metrics)


@program("R2 and root mean squared error", of_logs=True, tolerance=1e-6)
def r2(peer: Peer) -> Values:
    metrics = {"metrics": lambda: [keras.metrics.R2Score(name="r2"), keras.metrics.RootMeanSquaredError(name="rmse")]}
    return train(peer, rows=46, **metrics)
