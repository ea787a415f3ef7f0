"""Keras on PyTorch over keras_ddl: keras.distribution.DataParallel (Keras 3.16) and fit, each rank on its own rows.

    keras-ddl run -np 2 python examples/torch/keras_digits.py

Started without `keras-ddl run`, it trains alone: on the same rows in the same order, so that figures can be compared.
--rows 1437 leaves a last batch that ranks do not divide.
"""

from __future__ import annotations

import argparse
import os

os.environ["KERAS_BACKEND"] = "torch"

import numpy as np
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits

import keras_ddl.torch  # noqa: F401  (registers the backend)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--rows", type=int, default=1440, help="rows to train on (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=32, help="rows of all ranks together (default: %(default)s)")
    parser.add_argument("--weights", help="where rank 0 writes the trained weights, a .npz file")
    options = parser.parse_args()

    dist.init_process_group("ddl")  # before Keras would choose gloo
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    import keras

    pictures, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(7).permutation(len(pictures))
    x, y = (pictures / 16).astype("float32")[order], labels[order]

    # This rank's part of every batch, in the order of the batches.
    starts = range(0, options.rows, options.batch_size)
    batches = [np.arange(start, min(start + options.batch_size, options.rows)) for start in starts]
    mine = np.concatenate([np.array_split(batch, size)[rank] for batch in batches])

    keras.utils.set_random_seed(7)
    if size > 1:
        keras.distribution.set_distribution(keras.distribution.DataParallel(auto_shard_dataset=False))
    model = keras.Sequential(
        [keras.Input((64,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10, activation="softmax")]
    )
    model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy", metrics=["accuracy"])
    model.fit(
        x[mine],
        y[mine],
        batch_size=options.batch_size // size,
        epochs=options.epochs,
        shuffle=False,
        verbose=2 if rank == 0 else 0,
    )
    _, accuracy = model.evaluate(x[1440:], y[1440:], verbose=0)
    if rank == 0:
        print(f"held-out accuracy {accuracy:.4f}", flush=True)
        if options.weights:
            np.savez(options.weights, *(keras.ops.convert_to_numpy(each) for each in model.weights))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
