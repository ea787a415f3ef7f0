"""A keras.utils.PyDataset that can return selected rows of a batch, so each rank requests only its own rows.

An ordinary PyDataset returns global batches, so every rank reads all rows. If it has these two methods, keras_ddl reads
it by rows instead, in the dataset's own threads and processes:

    def batch_rows(self, index): ...        # how many rows self[index] has
    def rows(self, index, first, end): ...  # rows first to end - 1 of self[index] (perhaps none)
"""

from __future__ import annotations

from typing import Any

from keras_ddl.compat.keras import PyDatasetAdapter, keras
from keras_ddl.data.rows import chunk
from keras_ddl.data.share import marked
from keras_ddl.data.untuned import untuned


def has_rows(dataset: Any) -> bool:
    """Whether a dataset can return selected rows of a batch."""
    return isinstance(dataset, keras.utils.PyDataset) and hasattr(dataset, "rows") and hasattr(dataset, "batch_rows")


class RowsAdapter(PyDatasetAdapter):
    """Keras's PyDataset adapter, limited to this rank's rows."""

    def __init__(self, dataset: keras.utils.PyDataset, rank: int, size: int, **arguments: Any) -> None:
        super().__init__(_RowsOfRank(dataset, rank, size), **arguments)

    def get_tf_dataset(self) -> Any:
        """Returns the batches, marked as already cut to this rank's rows."""
        return marked(untuned(super().get_tf_dataset()))


class _RowsOfRank(keras.utils.PyDataset):
    def __init__(self, dataset: Any, rank: int, size: int) -> None:
        super().__init__(
            workers=dataset.workers,
            use_multiprocessing=dataset.use_multiprocessing,
            max_queue_size=dataset.max_queue_size,
        )
        self._dataset, self._rank, self._size = dataset, rank, size

    @property
    def num_batches(self) -> int | None:
        batches: int | None = self._dataset.num_batches
        return batches

    def __getitem__(self, index: int) -> Any:
        rows = self._dataset.batch_rows(index)
        return self._dataset.rows(index, *chunk(rows, self._rank, self._size))

    def on_epoch_begin(self) -> None:
        self._dataset.on_epoch_begin()

    def on_epoch_end(self) -> None:
        self._dataset.on_epoch_end()
