"""Batches from a random-access source; each rank reads only its own rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from keras_ddl.compat.keras import keras, tree
from keras_ddl.compat.tensorflow import tf
from keras_ddl.errors import ConfigError


def from_source(
    source: Any,
    *,
    batch_size: int,
    shuffle: bool = False,
    seed: int | None = None,
    drop_remainder: bool = False,
    workers: int = 1,
    use_multiprocessing: bool = False,
    max_queue_size: int = 10,
) -> keras.utils.PyDataset:
    """Returns batches of rows from a random-access source for `fit`, `evaluate` and `predict`.

    The batches are the same on any number of ranks. A rank reads only its own rows of each batch.

    Args:
        source: has `len(source)` and `source[i]`, which returns row i: an array, a number, or a structure of them such
            as (x, y) or a dict. This includes sequences, map-style datasets, grain's data sources and MapDatasets
            (tried by hand with grain 0.2), and a tf.data.Dataset of rows that tf.data.experimental.at can index.
        batch_size: rows of all ranks together.
        shuffle: reorder all rows in each epoch, in the same way on all ranks.
        seed: seed of the orders; None: drawn from NumPy's generator, which is equal on all ranks once the Strategy is
            made. A resumed run needs the seed of the earlier run.
        drop_remainder: leave out the last batch if it has fewer rows.
        workers, use_multiprocessing, max_queue_size: as in keras.utils.PyDataset.
    Raises: ConfigError: a source of unknown length, or without rows.
    Cost: one call of `source[i]` for each of the rank's rows.
    """
    rows = _Indexed(source) if isinstance(source, tf.data.Dataset) else source
    if not hasattr(rows, "__getitem__") or not hasattr(rows, "__len__") or not len(rows):
        raise ConfigError(
            "from_source: the source must have len(source) of 1 or more, and source[i]. "
            f"Received: {type(source).__name__}. Use tf.data, or keras_ddl.data.from_files."
        )
    if seed is None:
        seed = int(np.random.randint(2**31))
    return _Batches(
        rows,
        batch_size,
        shuffle,
        seed,
        drop_remainder,
        workers=workers,
        use_multiprocessing=use_multiprocessing,
        max_queue_size=max_queue_size,
    )


class _Batches(keras.utils.PyDataset):
    """Batches of a random-access source, of which a rank may read only some rows (`rows`)."""

    def __init__(
        self, source: Any, batch_size: int, shuffle: bool, seed: int, drop_remainder: bool, **arguments: Any
    ) -> None:
        super().__init__(**arguments)
        self._source, self._batch_size, self._shuffle, self._seed = source, batch_size, shuffle, seed
        self._used = len(source) // batch_size * batch_size if drop_remainder else len(source)
        self._epoch = -1
        self._reorder()

    def _reorder(self) -> None:
        self._epoch += 1
        rows = len(self._source)
        generator = np.random.default_rng([self._seed, self._epoch])
        self._order = generator.permutation(rows) if self._shuffle else np.arange(rows)

    def __len__(self) -> int:
        return -(-self._used // self._batch_size)

    def on_epoch_end(self) -> None:
        self._reorder()

    def batch_rows(self, index: int) -> int:
        return min(self._used, (index + 1) * self._batch_size) - index * self._batch_size

    def rows(self, index: int, first: int, end: int) -> Any:
        start = index * self._batch_size
        rows = [self._source[int(i)] for i in self._order[start + first : start + end]]
        if not rows:  # a rank without rows still gives the dtypes and shapes
            return tree.map_structure(lambda leaf: np.stack([leaf])[:0], self._source[int(self._order[start])])
        return tree.map_structure(lambda *leaves: np.stack(leaves), *rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows(index, 0, self.batch_rows(index))


class _Indexed:
    """A tf.data.Dataset of rows as a sequence."""

    def __init__(self, dataset: tf.data.Dataset) -> None:
        self._dataset = dataset
        self._length = int(dataset.cardinality())
        if self._length < 0:
            raise ConfigError(
                "from_source: a tf.data.Dataset must know how many rows it has. Received: a dataset of "
                f"{'infinite' if self._length == tf.data.INFINITE_CARDINALITY else 'unknown'} cardinality. Pass it "
                "to fit as it is, or use keras_ddl.data.from_files."
            )

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        return tree.map_structure(np.asarray, tf.data.experimental.at(self._dataset, index))
