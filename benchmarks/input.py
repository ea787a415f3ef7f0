"""What reading the input costs: rows read, and CPU seconds per row, on all ranks together and in one process.

    keras-ddl run -np 4 python benchmarks/input.py

Rank 0 first reads alone what one process would have read, while the others wait; then every rank reads its share of the
same global batches, as fit does. No model is trained. CPU is that of all threads of all ranks. The bound is 1.0: each
row of the data is then prepared once, wherever that is done. Sources:

    arrays      shuffled rows gathered from arrays in memory, as fit does it. Each rank pays some 0.1 ms a batch and
                10 ms a pass whatever the rows are, so small rows (--width) are far from the bound
    files       keras_ddl.data.from_files: records read and decoded, each file by one rank; numbers of rows are known
    endless     the same without known numbers: ranks ask each other with every batch whether there is more
    tf.data     a pipeline that every rank reads whole and keeps its rows of: the cost that the others avoid
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf
from _rounds import machine

import keras_ddl
from keras_ddl.compat.keras import tf_trainer


def decode(record: tf.Tensor) -> tf.Tensor:
    """Some work for each row, as decoding and augmentation would be."""
    row = tf.io.decode_raw(record, tf.float32)
    for _ in range(4):
        row = tf.sin(row) + tf.sqrt(tf.abs(row))
    return row


def make_files(folder: Path, rows: int, width: int, files: int) -> None:
    """Writes `rows` rows into `files` files."""
    values = np.random.default_rng(0).normal(size=(rows, width)).astype("float32")
    for number, part in enumerate(np.array_split(values, files)):
        part.tofile(folder / f"{number:03}.rows")


def reader(dataset: tf.data.Dataset) -> Callable[[int], tuple[int, float]]:
    """Returns a function that reads a dataset so many times, within one traced function as fit does: its rows, and the
    CPU seconds that it took.
    """

    @tf.function(autograph=False)
    def one_pass(iterator) -> tf.Tensor:
        def body(rows, _):
            found = iterator.get_next_as_optional()
            more = found.has_value()
            return rows + tf.cond(more, lambda: tf.shape(tf.nest.flatten(found.get_value())[0])[0], lambda: 0), more

        return tf.while_loop(lambda _, more: more, body, (0, True))[0]

    def read(epochs: int) -> tuple[int, float]:
        start = time.process_time()
        rows = sum(int(one_pass(iter(dataset))) for _ in range(epochs))
        return rows, time.process_time() - start

    return read


def of_arrays(values: np.ndarray, batch_size: int, strategy: tf.distribute.Strategy) -> tf.data.Dataset:
    """The dataset that fit makes of arrays."""
    iterator = tf_trainer.TFEpochIterator(x=values, batch_size=batch_size, shuffle=True, distribute_strategy=strategy)
    return iterator._get_iterator()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16384, help="rows of the data (default: 16384)")
    parser.add_argument("--width", type=int, default=4096, help="float32 values of a row (default: 4096)")
    parser.add_argument("--batch", type=int, default=64, help="rows of a global batch (default: 64)")
    parser.add_argument("--epochs", type=int, default=3, help="epochs per turn (default: 3)")
    parser.add_argument("--rounds", type=int, default=3, help="turns, of which the median counts (default: 3)")
    options = parser.parse_args()

    strategy = keras_ddl.Strategy()
    rank, size = strategy.rank, strategy.size
    folder = Path(keras_ddl.broadcast_object(tempfile.mkdtemp(prefix="keras-ddl-input-") if rank == 0 else None))
    if rank == 0:
        make_files(folder, options.rows, options.width, 8 * size)
        print(f"{machine()}; {size} ranks, {options.rows} rows of {options.width} float32, batches of {options.batch}")
    keras_ddl.barrier()
    try:
        for name, one_process, all_ranks in sources(folder, options, strategy):
            report(name, one_process, all_ranks, options, rank)
    finally:
        keras_ddl.barrier()
        if rank == 0:
            shutil.rmtree(folder)


def sources(folder: Path, options: argparse.Namespace, strategy: keras_ddl.Strategy):
    """Yields (name, dataset of one process (rank 0 only), dataset of this rank)."""
    values = np.random.default_rng(1).normal(size=(options.rows, options.width)).astype("float32")
    alone, row_bytes = strategy.rank == 0, 4 * options.width

    def records(path: tf.Tensor) -> tf.data.Dataset:
        return tf.data.FixedLengthRecordDataset(path, row_bytes).map(decode, num_parallel_calls=tf.data.AUTOTUNE)

    def rows_in(path: str) -> int:
        return Path(path).stat().st_size // row_bytes

    default = tf.distribute.get_strategy()
    pattern = str(folder / "*.rows")
    yield (
        "arrays",
        of_arrays(values, options.batch, default) if alone else None,
        of_arrays(values, options.batch, strategy),
    )
    whole = tf.data.Dataset.from_tensor_slices(sorted(map(str, folder.glob("*.rows")))).interleave(
        records, cycle_length=1
    )
    whole = whole.batch(options.batch)
    ahead = whole.prefetch(tf.data.AUTOTUNE)
    files = keras_ddl.data.from_files(pattern, records, batch_size=options.batch, count_rows=rows_in)
    yield "files", ahead, files
    yield "endless", ahead, keras_ddl.data.from_files(pattern, records, batch_size=options.batch)
    yield "tf.data", ahead, strategy.experimental_distribute_dataset(whole).prefetch(tf.data.AUTOTUNE)


def report(name: str, one_process, all_ranks, options: argparse.Namespace, rank: int) -> None:
    """Measures one source and prints a line on rank 0."""
    ratios, rows = [], []
    read_alone = reader(one_process) if rank == 0 else None
    read_share = reader(all_ranks)
    for _ in range(options.rounds + 1):
        keras_ddl.barrier()
        single = read_alone(options.epochs) if rank == 0 else None
        single = keras_ddl.broadcast_object(single)
        everyone = keras_ddl.all_gather_object(read_share(options.epochs))
        seconds = sum(cpu for _, cpu in everyone)
        rows = [count // options.epochs for count, _ in everyone]
        ratios.append((seconds / (options.epochs * options.rows)) / (single[1] / single[0]))
    ratios = sorted(ratios[1:])  # the first turn warms up
    if rank == 0:
        print(
            f"{name:8} rows kept per epoch {'+'.join(map(str, rows))} = {sum(rows)}; CPU per row, all ranks over one "
            f"process: {ratios[len(ratios) // 2]:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})",
            flush=True,
        )


if __name__ == "__main__":
    keras.utils.set_random_seed(1)
    main()
