"""Measures how far rounding alone makes training on several ranks differ from one process, in float32 and float64.

    python benchmarks/rounding.py --ranks 2 3

Ranks add the numbers of a batch in another order than one process does, so the last bits of a gradient differ, and
training amplifies the difference. The same happens to plain Keras in one process when TensorFlow uses another number
of threads; the first line of each table shows this for comparison. float64 shows that rounding is the only cause.

Prints the largest difference of a weight after certain numbers of steps, relative to the largest weight, and the
largest difference in validation accuracy after an epoch. Both models learn scikit-learn's digits:

    digits        the README's network, batches and optimizer
    transformer   two blocks of attention over the 64 pixels as tokens; Adam, with --learning-rate
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from _smoke import options_of

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
from keras import layers

import keras_ddl
from keras_ddl.topology.launcher import find_launcher

STEPS = (1, 20, 65, 100, 240, 480)
EPOCHS, BATCH, TRAIN_ROWS = 20, 64, 1500  # 24 steps per epoch
DTYPES = ("float32", "float64")
MODELS = ("digits", "transformer")


def make(name: str, learning_rate: float) -> keras.Model:
    inputs = keras.Input((8, 8, 1))
    optimizer = keras.optimizers.Adam()
    if name == "digits":
        x = layers.Flatten()(layers.Conv2D(32, 3, activation="relu")(inputs))
    else:
        optimizer = keras.optimizers.Adam(learning_rate)
        tokens = layers.Reshape((64,))(16 * inputs) + 17 * np.arange(64)  # a word for each pixel and gray level
        x = layers.Embedding(17 * 64, 32)(tokens)
        for _ in range(2):
            x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 16)(x, x))
            x = layers.LayerNormalization()(x + layers.Dense(32)(layers.Dense(64, activation="relu")(x)))
        x = layers.GlobalAveragePooling1D()(x)
    model = keras.Model(inputs, layers.Dense(10, activation="softmax")(x))
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


class WeightsAt(keras.callbacks.Callback):
    """Keeps all weights after STEPS steps, as one vector each."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: dict[int, np.ndarray] = {}

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        step = int(self.model.optimizer.iterations)
        if step in STEPS:
            self.weights[step] = np.concatenate([np.ravel(each) for each in self.model.get_weights()])


def train(file: Path, names: Sequence[str], learning_rate: float, epochs: int) -> None:
    """Trains the models in every dtype, with plain Keras or as a rank, and saves weights and accuracies."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    x, y = digits.images[..., None] / 16.0, digits.target
    strategy = keras_ddl.Strategy(seed=1) if find_launcher() else None
    results: dict[str, np.ndarray] = {}
    for name in names:
        for dtype in DTYPES:
            keras.config.set_floatx(dtype)
            keras.config.set_dtype_policy(dtype)
            keras.utils.set_random_seed(1)
            with contextlib.nullcontext() if strategy is None else strategy.scope():
                model = make(name, learning_rate)
            kept = WeightsAt()
            history = model.fit(
                x[:TRAIN_ROWS],
                y[:TRAIN_ROWS],
                batch_size=BATCH,
                epochs=epochs,
                verbose=0,
                validation_data=(x[TRAIN_ROWS:], y[TRAIN_ROWS:]),
                callbacks=[kept],
            ).history
            results |= {f"{name}/{dtype}/{step}": weights for step, weights in kept.weights.items()}
            results[f"{name}/{dtype}/accuracy"] = np.array(history["val_accuracy"])
    if strategy is None or strategy.rank == 0:
        np.savez(file, **results)


def show(name: str, dtype: str, one: dict[str, np.ndarray], others: dict[str, dict[str, np.ndarray]]) -> None:
    key = f"{name}/{dtype}"
    reached = [step for step in STEPS if f"{key}/{step}" in one]
    print(f"\n{key}, compared with plain Keras with 1 thread")
    print(f"{'after steps':>26}" + "".join(f"{step:>8}" for step in reached) + "  accuracy")
    for other, results in others.items():
        gaps = [
            np.abs(results[f"{key}/{step}"] - one[f"{key}/{step}"]).max() / np.abs(one[f"{key}/{step}"]).max()
            for step in reached
        ]
        accuracy = np.abs(results[f"{key}/accuracy"] - one[f"{key}/accuracy"]).max()
        print(f"{other:>26}" + "".join(f"{gap:>8.0e}" for gap in gaps) + f"  {accuracy:.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2], help="default: 2")
    parser.add_argument(
        "--learning-rate", type=float, default=0.003, help="learning rate of the transformer (default: %(default)s)"
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="default: all")
    parser.add_argument("--epochs", type=int, default=EPOCHS, help="default: %(default)s")
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    options = options_of(parser, models=["digits"], epochs=1)
    if options.train is not None:
        train(options.train, options.models, options.learning_rate, options.epochs)
        return
    launcher = str(Path(sys.executable).with_name("keras-ddl"))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "results.npz")

        def results(*command: str, **variables: str) -> dict[str, np.ndarray]:
            words = [*command, __file__, "--train", str(file), "--models", *options.models]
            words += ["--learning-rate", str(options.learning_rate), "--epochs", str(options.epochs)]
            subprocess.run(words, env=os.environ | variables, check=True)
            with np.load(file) as saved:
                return dict(saved)

        one = results(sys.executable, TF_NUM_INTRAOP_THREADS="1")
        others = {"plain Keras, 2 threads": results(sys.executable, TF_NUM_INTRAOP_THREADS="2")}
        for size in options.ranks:
            others[f"{size} ranks"] = results(launcher, "run", "-np", str(size))
    for name in options.models:
        for dtype in DTYPES:
            show(name, dtype, one, others)


if __name__ == "__main__":
    main()
