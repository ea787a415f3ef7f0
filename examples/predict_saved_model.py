"""Predicts held-out digits with an exported SavedModel and TensorFlow alone: no Keras, no keras_ddl, no training code.

    python examples/predict_saved_model.py digits-output/saved_model digits-output/held_out.npz

Takes the highest version, as TensorFlow Serving does. Exit status 1 when the accuracy is under --minimum-accuracy.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

# From here on, importing these fails, so neither this program nor the model can depend on them.
for module in ("keras_ddl", "keras"):
    sys.modules[module] = None

import tensorflow as tf  # noqa: E402


def newest_version(folder: Path) -> Path:
    versions = [entry for entry in folder.iterdir() if entry.name.isdigit()]
    if not versions:
        sys.exit(f"A SavedModel folder holds numbered versions. Received: {folder}, which holds none.")
    return max(versions, key=lambda entry: int(entry.name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("saved_model", type=Path, help="folder of numbered versions")
    parser.add_argument("held_out", type=Path, help=".npz with images and labels")
    parser.add_argument("--minimum-accuracy", type=float, default=0.0)
    arguments = parser.parse_args()

    version = newest_version(arguments.saved_model)
    model = tf.saved_model.load(str(version))
    predict = model.signatures["serving_default"]
    (input_name,) = predict.structured_input_signature[1]
    with np.load(arguments.held_out) as held_out:
        images, labels = held_out["images"], held_out["labels"]
    (scores,) = predict(**{input_name: tf.constant(images)}).values()
    accuracy = float(np.mean(np.argmax(scores.numpy(), axis=1) == labels))

    print(f"{version}: TensorFlow {tf.__version__} alone; keras_ddl and Keras cannot be imported here")
    print(f"accuracy on {len(labels)} held-out images: {accuracy:.4f}")
    if accuracy < arguments.minimum_accuracy:
        sys.exit(f"The accuracy must be {arguments.minimum_accuracy} or more. Received: {accuracy:.4f}.")


if __name__ == "__main__":
    main()
