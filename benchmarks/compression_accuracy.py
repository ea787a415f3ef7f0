"""Measures how much accuracy compression costs: trains the network of examples/digits.py with several seeds.

    KERAS_DDL_MODE=x:1x2 keras-ddl run -np 2 python benchmarks/compression_accuracy.py

The mode makes every rank a host, so that all gradients of weights are rounded. For each compression the program prints
the accuracy on 360 held-out images by seed, and the mean and the standard deviation of accuracy and loss over the
seeds. All runs with one seed begin with the same weights and see the same batches.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import keras
import numpy as np
from _rounds import machine
from _smoke import options_of

import keras_ddl

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from digits import build_model, load_split

COMPRESSIONS = (None, "bfloat16", "float16")


def train(compression: str | None, seed: int, epochs: int) -> tuple[float, float]:
    """Returns (loss, accuracy) on the held-out images. COLLECTIVE."""
    strategy = keras_ddl.Strategy(compression=compression, seed=seed)
    keras.utils.set_random_seed(seed)
    data = load_split()
    with strategy.scope():
        model = build_model()
        optimizer = keras.optimizers.SGD(0.04, momentum=0.9, nesterov=True)
        model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    callbacks = [
        keras_ddl.callbacks.LearningRateWarmup(warmup_epochs=3, scaling="linear"),
        keras_ddl.callbacks.LearningRateSchedule(0.1, start_epoch=max(1, epochs * 3 // 4)),
    ]
    model.fit(*data["train"], batch_size=32 * keras_ddl.size(), epochs=epochs, verbose=0, callbacks=callbacks)
    is_rounded = "16 bits between hosts" in strategy.explain(model)
    assert is_rounded == (compression is not None), "every rank must be a host: set KERAS_DDL_MODE"
    loss, accuracy = model.evaluate(*data["held_out"], batch_size=256, verbose=0)
    return loss, accuracy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=20)
    options = options_of(parser, seeds=1, epochs=1)
    keras_ddl.init()
    found: dict[str | None, list[tuple[float, float]]] = {each: [] for each in COMPRESSIONS}
    for compression in COMPRESSIONS:
        for seed in range(1, options.seeds + 1):
            found[compression].append(train(compression, seed, options.epochs))
    if keras_ddl.rank() > 0:
        return
    print(f"{machine()}; {keras_ddl.size()} ranks, mode {keras_ddl.topology().mode}; {options.epochs} epochs")
    print(f"{'compression':<12} {'accuracy by seed':<{8 * options.seeds}} {'mean':>7} {'sd':>7} {'loss':>7} {'sd':>7}")
    for compression, results in found.items():
        losses, accuracies = np.array(results).T
        by_seed = " ".join(f"{accuracy:.4f} " for accuracy in accuracies)
        ddof = min(1, options.seeds - 1)  # one seed has no deviation
        spread = (accuracies.mean(), accuracies.std(ddof=ddof), losses.mean(), losses.std(ddof=ddof))
        numbers = " ".join(f"{number:7.4f}" for number in spread)
        print(f"{compression or 'none':<12} {by_seed:<{8 * options.seeds}} {numbers}")


if __name__ == "__main__":
    main()
