"""Small versions of typical networks for test_zoo.py. Each function returns a compiled model and a batch (x, y)."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from harness.examples import EXAMPLES
from keras_ddl import parts

sys.path[:0] = [str(EXAMPLES)]  # only for these imports: see tests/project/examples/translation_parts.py
contrastive, digits, losses, lstm, transformer = map(
    importlib.import_module,
    ("contrastive", "digits", "translation.losses", "translation.lstm", "translation.transformer"),
)
del sys.path[0]

layers = keras.layers
ROWS = 10  # differs from every other extent of these networks
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


def translator(model: keras.Model) -> Program:
    return compiled(model, {"source": tokens(7), "target": tokens(9)}, tokens(9), losses.TokenCrossentropy(0.1))


def example_of_digits() -> Program:
    return compiled(digits.build_model(), numbers(8, 8, 1), labels())


def example_of_codes() -> Program:
    return compiled(contrastive.Contrastive(), numbers(8, 8, 1), None, None)


CELLS = {
    "gru_before": lambda: layers.GRU(4, reset_after=False),
    "gru_dropout": lambda: layers.GRU(4, dropout=0.2, recurrent_dropout=0.2),
    "bidirectional": lambda: layers.Bidirectional(layers.LSTM(4, recurrent_dropout=0.2)),
    "masked": lambda: keras.Sequential([layers.Masking(), layers.LSTM(4)]),
    "cells": lambda: layers.RNN([layers.LSTMCell(3), layers.GRUCell(4)]),
}
ATTENTIONS = {
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
