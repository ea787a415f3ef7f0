"""Networks as people train them, small: what test_zoo.py cuts. Each returns a compiled model and a batch (x, y)."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from harness.examples import EXAMPLES
from keras_ddl import parts

sys.path[:0] = [str(EXAMPLES)]  # not for longer than this: see tests/project/examples/translation_parts.py
contrastive, digits, losses, lstm, transformer = map(
    importlib.import_module,
    ("contrastive", "digits", "translation.losses", "translation.lstm", "translation.transformer"),
)
del sys.path[0]

layers, ops = keras.layers, keras.ops
ROWS = 10  # no other extent of these networks
RNG = np.random.default_rng(0)
Program = tuple[keras.Model, Any]


def compiled(
    model: keras.Model, x: Any, y: Any, loss: Any = "sparse_categorical_crossentropy", **options: Any
) -> Program:
    model.compile(options.pop("optimizer", None) or keras.optimizers.Adam(), loss, **options)
    return model, x if y is None else (x, y)


def numbers(*shape: int) -> np.ndarray:
    return RNG.normal(size=(ROWS, *shape)).astype("float32")


def tokens(*shape: int) -> np.ndarray:
    return RNG.integers(0, 50, (ROWS, *shape)).astype("int32")


def labels() -> np.ndarray:
    return RNG.integers(0, 5, ROWS).astype("int32")


def head(x: Any) -> Any:
    return layers.Dense(5, activation="softmax")(x)


def application(name: str, size: int = 32, **options: Any) -> Program:
    make = getattr(keras.applications, name)
    model = make(weights=None, input_shape=(size, size, 3), classes=5, **options)
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    return compiled(model, numbers(size, size, 3), labels(), optimizer=optimizer, metrics=["accuracy"])


def benchmark(name: str) -> Program:
    from keras_ddl.bench.training import networks

    network = networks.NETWORKS[name]
    return compiled(network.make(), *network.rows(ROWS), optimizer="sgd")


def recurrent(make: Callable[[], keras.Layer]) -> Program:
    inputs = keras.Input((7, 6))
    return compiled(keras.Model(inputs, head(make()(inputs))), numbers(7, 6), labels())


def attention(make: Callable[[Any], Any]) -> Program:
    inputs = keras.Input((7, 8))
    return compiled(keras.Model(inputs, head(layers.GlobalAveragePooling1D()(make(inputs)))), numbers(7, 8), labels())


class Detector(keras.Model):
    """RetinaNet's loss (Lin et al., arXiv 1708.02002) on padded boxes: anchors matched by IoU, focal and smooth L1."""

    CLASSES, ANCHORS = 3, 32

    def __init__(self) -> None:
        super().__init__()
        self.body = keras.Sequential(
            [layers.Conv2D(4, 3, 2, "same", activation="relu"), layers.Conv2D(6, 3, 2, "same")]
        )
        self.boxes, self.classes = (
            layers.Conv2D(8, 3, padding="same"),
            layers.Conv2D(2 * self.CLASSES, 3, padding="same"),
        )
        corner = np.stack(np.meshgrid(np.arange(4), np.arange(4), [0, 1], indexing="ij"), -1).reshape(-1, 3)
        self.anchors = np.concatenate([corner[:, :2], corner[:, :2] + 1 + corner[:, 2:]], 1).astype(
            keras.config.floatx()
        )

    def build(self, shape: Any) -> None:
        for layer, of in ((self.body, shape), (self.boxes, (None, 4, 4, 6)), (self.classes, (None, 4, 4, 6))):
            layer.build(of)

    def call(self, images: Any, training: bool | None = None) -> dict[str, Any]:
        features = self.body(images)
        return {
            "boxes": ops.reshape(self.boxes(features), (-1, self.ANCHORS, 4)),
            "classes": ops.reshape(self.classes(features), (-1, self.ANCHORS, self.CLASSES)),
        }

    def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, *_: Any) -> Any:
        overlap = self._overlap(y["boxes"])  # [rows, anchors, boxes]
        overlap = ops.where(ops.expand_dims(y["classes"] >= 0, 1), overlap, -1.0)  # not those of padding
        match, best = ops.argmax(overlap, axis=-1), ops.max(overlap, axis=-1)
        forced = ops.max(ops.one_hot(ops.argmax(overlap, axis=1), self.ANCHORS), axis=1) > 0  # each box has one
        is_box, is_none = ops.logical_or(best >= 0.5, forced), best < 0.4
        boxes = ops.take_along_axis(y["boxes"], ops.expand_dims(match, -1), axis=1)
        classes = ops.take_along_axis(y["classes"], match, axis=1)
        sizes = self.anchors[:, 2:] - self.anchors[:, :2]
        wanted = ops.concatenate([(boxes[..., :2] - self.anchors[:, :2]) / sizes, boxes[..., 2:] - boxes[..., :2]], -1)
        positive = ops.cast(is_box, keras.config.floatx())
        found = ops.maximum(ops.sum(positive), 1.0)
        error = ops.abs(wanted - y_pred["boxes"])
        smooth = ops.sum(ops.where(error < 1.0, 0.5 * error * error, error - 0.5), -1)
        truth = ops.one_hot(ops.where(is_box, classes, -1), self.CLASSES)
        focal = ops.sum(
            keras.losses.BinaryFocalCrossentropy(from_logits=True, reduction="none")(
                truth[..., None], y_pred["classes"][..., None]
            ),
            -1,
        )
        counted = ops.cast(ops.logical_or(is_box, is_none), keras.config.floatx())
        return ops.sum(smooth * positive) / found + ops.sum(focal * counted) / found

    def _overlap(self, boxes: Any) -> Any:
        mine, theirs = self.anchors[None, :, None], ops.expand_dims(boxes, 1)
        low, high = ops.maximum(mine[..., :2], theirs[..., :2]), ops.minimum(mine[..., 2:], theirs[..., 2:])
        both = ops.prod(ops.maximum(high - low, 0.0), -1)
        areas = [ops.prod(each[..., 2:] - each[..., :2], -1) for each in (ops.convert_to_tensor(mine), theirs)]
        return both / ops.maximum(areas[0] + areas[1] - both, 1e-6)


def detector() -> Program:
    y = {"boxes": np.abs(numbers(6, 4)), "classes": RNG.integers(-1, 3, (ROWS, 6)).astype("int32")}
    return compiled(Detector(), numbers(16, 16, 3), y, None)


def translator(model: keras.Model) -> Program:
    return compiled(model, {"source": tokens(7), "target": tokens(9)}, tokens(9), losses.TokenCrossentropy(0.1))


def example_of_digits() -> Program:
    return compiled(digits.build_model(), numbers(8, 8, 1), labels())


def example_of_codes() -> Program:
    return compiled(contrastive.Contrastive(), numbers(8, 8, 1), None, None)


CELLS = {
    "lstm": lambda: layers.LSTM(4),
    "gru": lambda: layers.GRU(4),
    "gru_before": lambda: layers.GRU(4, reset_after=False),
    "gru_dropout": lambda: layers.GRU(4, dropout=0.2, recurrent_dropout=0.2),
    "bidirectional": lambda: layers.Bidirectional(layers.LSTM(4, recurrent_dropout=0.2)),
    "cells": lambda: layers.RNN([layers.LSTMCell(3), layers.GRUCell(4)]),
}
ATTENTIONS = {
    "multi_head": lambda x: layers.MultiHeadAttention(2, 4, dropout=0.1)(x, x),
    "multi_head_causal": lambda x: layers.MultiHeadAttention(2, 4)(x, x, use_causal_mask=True),
    "group_query": lambda x: layers.GroupQueryAttention(4, 4, 2, dropout=0.1)(x, x, use_causal_mask=True),
    "additive": lambda x: layers.AdditiveAttention()([x, x]),
}
APPLICATIONS = {
    "MobileNetV3Small": {"alpha": 0.35},
    "EfficientNetV2B0": {},
}
BENCHMARKED = [] if parts.is_missing("bench") else ["cnn", "lstm", "mlp", "resnet"]
QUICK: dict[str, Callable[[], Program]] = {
    "rnn_gru_dropout": lambda: recurrent(CELLS["gru_dropout"]),
    **{f"attention_{name}": lambda make=make: attention(make) for name, make in ATTENTIONS.items()},
    "detector": detector,
    **{f"benchmark_{name}": lambda name=name: benchmark(name) for name in BENCHMARKED[:2]},
    "example_digits": example_of_digits,
    "example_contrastive": example_of_codes,
    "example_transformer": lambda: translator(transformer.Transformer(50, width=8, layers=1, heads=2, inner=16)),
}
LONG: dict[str, Callable[[], Program]] = {
    **{f"rnn_{name}": lambda make=make: recurrent(make) for name, make in CELLS.items() if name != "gru_dropout"},
    **{name: lambda name=name, options=options: application(name, **options) for name, options in APPLICATIONS.items()},
    **{f"benchmark_{name}": lambda name=name: benchmark(name) for name in BENCHMARKED[2:]},
    "example_lstm": lambda: translator(lstm.LSTMTranslator(50, units=8, layers=1)),
}
