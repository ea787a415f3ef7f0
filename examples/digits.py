"""The main job: a convolutional network learns scikit-learn's handwritten digits (1,797 real scans) on all ranks.

    keras-ddl run -np 2 python examples/digits.py --epochs 20 --output-dir digits-output

Every rank runs this same file; without a launcher it is rank 0 of size 1. Writes, from rank 0:

    digits-output/ckpt/           checkpoints and the base graph, for `keras-ddl export` (or --ckpt-dir)
    digits-output/history.csv     the global training curve
    digits-output/held_out.npz    images and labels that training never saw, for predict_saved_model.py
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import keras
import numpy as np

import keras_ddl


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    results = Path(os.environ.get("RESULT_DIR", "digits-output"))
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=32, help="rows per rank and step (default: %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=0.04, help="for one process (default: %(default)s)")
    parser.add_argument("--warmup-epochs", type=float, default=3, help="default: %(default)s")
    parser.add_argument("--scaling", choices=["linear", "sqrt", "none"], default="linear")
    parser.add_argument("--output-dir", type=Path, default=results, help="default: $RESULT_DIR or %(default)s")
    parser.add_argument("--ckpt-dir", type=Path, help="default: OUTPUT_DIR/ckpt")
    parser.add_argument("--resume", action="store_true", help="continue from the latest checkpoint")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--mode", help="topology, as KERAS_DDL_MODE; default: follow the hosts")
    return parser.parse_args()


def load_split() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Returns the scans as float32 [n, 8, 8, 1] in 0..1 with labels [n]: 70% train, 10% validation, 20% held out.

    The split is the same in every run and on every rank.
    """
    from sklearn.datasets import load_digits  # here, because importers of the model do not need it

    images, labels = load_digits(return_X_y=True)
    images = (images.reshape(-1, 8, 8, 1) / 16).astype(np.float32)
    order = np.random.default_rng(20).permutation(len(images))
    train, validation, held_out = np.split(order, [int(0.7 * len(order)), int(0.8 * len(order))])
    parts = {"train": train, "validation": validation, "held_out": held_out}
    return {name: (images[rows], labels[rows].astype(np.int32)) for name, rows in parts.items()}


def build_model() -> keras.Model:
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((8, 8, 1), name="image"),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(64, 3, padding="same", activation="relu"),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dropout(0.4),
            layers.Dense(10, activation="softmax", name="digit"),
        ],
        name="digits",
    )


def main() -> None:
    arguments = parse_arguments()
    keras_ddl.init(arguments.mode)
    strategy = keras_ddl.Strategy(seed=arguments.seed)
    keras.utils.set_random_seed(arguments.seed)
    data = load_split()

    with strategy.scope():
        model = build_model()
        model.compile(
            keras.optimizers.SGD(arguments.learning_rate, momentum=0.9, nesterov=True),
            "sparse_categorical_crossentropy",
            metrics=["accuracy"],
        )

    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    ckpt_dir = arguments.ckpt_dir or arguments.output_dir / "ckpt"
    scaling = None if arguments.scaling == "none" else arguments.scaling
    start = time.perf_counter()
    model.fit(
        *data["train"],
        batch_size=arguments.batch_size * keras_ddl.size(),  # Keras's batch_size is the global one
        epochs=arguments.epochs,
        validation_data=data["validation"],
        verbose=2,
        callbacks=[
            keras_ddl.callbacks.LearningRateWarmup(warmup_epochs=arguments.warmup_epochs, scaling=scaling),
            keras_ddl.callbacks.LearningRateSchedule(0.1, start_epoch=max(1, arguments.epochs * 3 // 4)),
            keras_ddl.callbacks.Checkpoint(ckpt_dir, monitor="val_accuracy", resume=arguments.resume),
            keras_ddl.callbacks.ExportBase(sample=data["train"][0][:8]),
            keras.callbacks.CSVLogger(arguments.output_dir / "history.csv", append=arguments.resume),
        ],
    )
    seconds = time.perf_counter() - start

    _, accuracy = model.evaluate(*data["held_out"], batch_size=256, verbose=0)
    if keras_ddl.rank() == 0:
        images, labels = data["held_out"]
        np.savez(arguments.output_dir / "held_out.npz", images=images, labels=labels)
        print(f"trained in {seconds:.1f} s on {keras_ddl.size()} rank(s); held-out accuracy {accuracy:.4f}")


if __name__ == "__main__":
    main()
