"""Rows from files, each file read by one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from keras_ddl import communicator
from keras_ddl.communicator.comparison import require_equal
from keras_ddl.compat.tensorflow import tf
from keras_ddl.data.per_rank import PerRankDataset
from keras_ddl.data.rows import chunk
from keras_ddl.errors import ConfigError


def from_files(
    pattern: str | Sequence[str],
    reader: Callable[[tf.Tensor], Any],
    *,
    batch_size: int,
    shuffle: bool = False,
    shuffle_rows: int = 0,
    seed: int | None = None,
    parallel_files: int = 1,
    count_rows: Callable[[str], int] | None = None,
) -> tf.data.Dataset:
    """Returns batches of rows from files for `fit`, `evaluate` and `predict`. Each rank reads its own files.

    An epoch has every row of every file exactly once. A rank always gets the same files, and all ranks get about the
    same number of bytes. Ranks whose files end earlier continue with empty batches until all ranks are done, so all
    ranks take the same number of steps. Which rows share a batch depends on the number of ranks; if it must not, let
    every rank read everything.

    Args:
        pattern: a glob pattern, or paths and patterns; the same files on all ranks.
        reader: a function from a path (string tensor) to the rows of that file, as a tf.data.Dataset whose elements are
            rows, or as tensors whose first dimension counts rows. It is traced: read NumPy files with
            tf.numpy_function.
        batch_size: rows of all ranks together.
        shuffle: read the rank's files in a new order in each epoch.
        shuffle_rows: size of the buffer in memory in which rows are shuffled, differently in every epoch; 0: rows are
            not shuffled.
        seed: seed of both shuffles; None: TensorFlow's global seed, which the Strategy sets.
        parallel_files: number of files read at a time, one row from each in turn.
        count_rows: a function from a path to the number of rows in that file, called for the rank's files. Ranks then
            agree on the number of batches in advance, and the progress bar knows it.
    Raises:
        ConfigError: no file, or a batch_size below 1. RankMismatchError: ranks see different files.
    COLLECTIVE over all ranks. Reading without `count_rows` is COLLECTIVE, too: all ranks must read equally often.
    Cost: without `count_rows`, 4 bytes between ranks per batch.
    """
    several = communicator.is_initialized() and communicator.size() > 1
    rank, size = (communicator.rank(), communicator.size()) if several else (0, 1)
    if batch_size < 1:
        raise ConfigError(
            "from_files: batch_size is the number of rows of all ranks together, 1 or more. Received: "
            f"batch_size={batch_size} (rank {rank})."
        )
    patterns = [pattern] if isinstance(pattern, str) else list(pattern)
    files = sorted({path for each in patterns for path in tf.io.gfile.glob(each)})
    lengths = [tf.io.gfile.stat(path).length for path in files]
    if several:
        _check_same_files(files, lengths)
    if not files:
        raise ConfigError(
            f"from_files: the pattern must match a file. Received: {pattern!r} (rank {rank}). Patterns are those of "
            "tf.io.gfile.glob, relative to the working directory."
        )
    readers = min(size, batch_size)  # if a batch has fewer rows than there are ranks, the last ranks get none
    mine = _deal(files, lengths, readers)[rank] if rank < readers else []
    paths = tf.data.Dataset.from_tensor_slices(tf.constant(mine, tf.string))
    if shuffle and mine:
        paths = paths.shuffle(len(mine), seed=seed)

    def rows_of(path: tf.Tensor) -> tf.data.Dataset:
        rows = reader(path)
        return rows if isinstance(rows, tf.data.Dataset) else tf.data.Dataset.from_tensor_slices(rows)

    rows = paths.interleave(
        rows_of,
        cycle_length=parallel_files,
        num_parallel_calls=tf.data.AUTOTUNE if parallel_files > 1 else None,
        deterministic=True if parallel_files > 1 else None,
    )
    if shuffle_rows:
        rows = rows.shuffle(shuffle_rows, seed=seed)
    first, end = chunk(batch_size, rank, size)
    own_rows = max(1, end - first)
    batches = rows.batch(own_rows)
    if count_rows is not None:
        number = -(-sum(int(count_rows(path)) for path in mine) // own_rows)
        batches = batches.apply(tf.data.experimental.assert_cardinality(number))
    batches = batches.prefetch(tf.data.AUTOTUNE)
    return PerRankDataset(batches) if several else batches


def _deal(files: Sequence[str], lengths: Sequence[int], size: int) -> list[list[str]]:
    """Returns each rank's files. Deals the largest first, to the rank with the fewest bytes so far (Graham, 1969)."""
    dealt: list[list[str]] = [[] for _ in range(size)]
    dealt_bytes = [(0, rank) for rank in range(size)]
    for length, file in sorted(zip(lengths, files), key=lambda one: (-one[0], one[1])):
        bytes_, rank = min(dealt_bytes)
        dealt_bytes[rank] = (bytes_ + max(length, 1), rank)
        dealt[rank].append(file)
    return [sorted(some) for some in dealt]


def _check_same_files(files: Sequence[str], lengths: Sequence[int]) -> None:
    def received(mine: Any, theirs: Any, other: int) -> str:
        differing = sorted(set(zip(*mine)) ^ set(zip(*theirs)))[:3]
        return (
            f"{len(mine[0])} files on rank 0 and {len(theirs[0])} on rank {other}, which differ in (path, bytes) "
            f"{differing}"
        )

    require_equal(
        (files, lengths),
        "keras_ddl/data/files",
        "from_files: all ranks must see the same files, because each reads its part of them.",
        "tempfile.mkdtemp() makes a different directory on each rank, so let rank 0 make it where all hosts see it: "
        "keras_ddl.broadcast_object(tempfile.mkdtemp(dir='.') if keras_ddl.rank() == 0 else None). If every host has "
        "its own files, use strategy.distribute_datasets_from_function.",
        received=received,
    )
