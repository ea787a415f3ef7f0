"""Trains ResNet-8 on 200 classes of drawn pictures with a large global batch, linear scaling and warm-up.

    python examples/images/train.py
    keras-ddl run -np 4 python examples/images/train.py --batch-size 1024

This program draws the pictures itself (drawing.py) and downloads nothing. --learning-rate is the rate for 64 pictures
per step. For a larger global batch it is multiplied by batch / 64 (Goyal et al. 2017, arXiv 1706.02677), which the
warm-up reaches over the first epochs. The result is the same on any number of ranks. OUTPUT_DIR/history.csv has the
curve.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# TensorFlow leaves oneDNN off on some CPUs on which this program is twice as fast with it.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")

import drawing
import keras
from resnet import resnet

import keras_ddl
from keras_ddl import schedules

BASE_BATCH = 64  # global batch of the base learning rate
EVALUATED = 500  # pictures per evaluation step


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = result.add_argument
    add("--batch-size", type=int, default=256, help="pictures per step of all ranks together (default: %(default)s)")
    add("--epochs", type=int, default=12, help="default: %(default)s; the rate falls to a tenth after 3/4 of them")
    add("--images", type=int, default=24_576, help="pictures to learn from (default: %(default)s)")
    add("--held-out", type=int, default=2_000, help="pictures for validation (default: %(default)s)")
    add("--learning-rate", type=float, default=0.05, help=f"rate for {BASE_BATCH} pictures per step (%(default)s)")
    add("--scaling", choices=["linear", "none"], default="linear", help="how the rate grows with the batch (linear)")
    add("--warmup-epochs", type=float, default=3, help="default: %(default)s; 0 scales at once")
    add("--width", type=int, default=16, help="channels of the first stage (default: %(default)s)")
    add("--seed", type=int, default=1, help="seed for weights, order and pictures (default: %(default)s)")
    add("--output-dir", type=Path, help="directory for history.csv (default: not written)")
    return result


def compiled(width: int, rate: Any) -> keras.Model:
    """Returns a new model. rate: SGD's learning rate, a number or a schedule."""
    model = resnet(drawing.SIZE, drawing.CLASSES, width)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(rate, momentum=0.9, nesterov=True), loss, metrics=["accuracy"])
    return model


def train(options: argparse.Namespace, verbose: int = 2) -> dict[str, Any]:
    """Trains and returns `fit`'s history; "val_accuracy" is the accuracy on held-out pictures. COLLECTIVE."""
    strategy = keras_ddl.Strategy(seed=options.seed)
    keras.utils.set_random_seed(options.seed)
    pictures = drawing.draw(options.images, 2 * options.seed)
    held_out = drawing.draw(options.held_out, 2 * options.seed + 1)
    with strategy.scope():
        model = compiled(options.width, options.learning_rate)
    factor = options.batch_size / BASE_BATCH if options.scaling == "linear" else 1.0
    callbacks: list[keras.callbacks.Callback] = [
        keras_ddl.callbacks.LearningRateWarmup(warmup_epochs=options.warmup_epochs, scaling=factor),
        keras_ddl.callbacks.LearningRateSchedule(0.1, start_epoch=max(1, options.epochs * 3 // 4)),
    ]
    if options.output_dir and keras_ddl.rank() == 0:
        options.output_dir.mkdir(parents=True, exist_ok=True)
    if options.output_dir:
        callbacks.append(keras.callbacks.CSVLogger(options.output_dir / "history.csv"))
    return model.fit(
        *pictures,
        batch_size=options.batch_size,
        epochs=options.epochs,
        validation_data=held_out,
        validation_batch_size=EVALUATED,
        verbose=verbose,
        callbacks=callbacks,
    ).history


def subject(batch: int, images: int = 12_288) -> tuple[keras.Model, Any, Any]:
    """Returns what `keras-ddl bench train train:subject` trains: the same model with a global batch of `batch` rows."""
    steps = -(-images // batch)
    rate = schedules.LinearWarmup(0.05 * batch / BASE_BATCH, 2 * steps, start_learning_rate=0.05)
    return compiled(16, rate), drawing.draw(images, 2), drawing.draw(1_000, 3)


def main(arguments: Sequence[str] | None = None, say: Callable[[str], object] = print) -> None:
    options = parser().parse_args(arguments)
    keras_ddl.init()
    begin = time.perf_counter()
    history = train(options, verbose=2)
    if keras_ddl.rank() == 0:
        seconds = time.perf_counter() - begin
        accuracy = history["val_accuracy"][-1]
        say(f"trained in {seconds:.1f} s on {keras_ddl.size()} rank(s); held-out accuracy {accuracy:.4f}")


if __name__ == "__main__":
    main()
