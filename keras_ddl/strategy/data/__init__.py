"""Each rank's share of the data: cut out of batches that all read, or read by one rank alone."""

from keras_ddl.strategy.data.files import from_files
from keras_ddl.strategy.data.per_rank import PerRankDataset, per_rank_dataset
from keras_ddl.strategy.data.rows import (
    BatchRows,
    chunk,
    gather_rows,
    row_count,
    static_rows,
    take_chunk,
)
from keras_ddl.strategy.data.share import agree_number, batch_rows_of, check_shuffle_seeds, is_shared, share_dataset
from keras_ddl.strategy.data.source import from_source

__all__ = [
    "BatchRows",
    "PerRankDataset",
    "agree_number",
    "batch_rows_of",
    "check_shuffle_seeds",
    "chunk",
    "from_files",
    "from_source",
    "gather_rows",
    "is_shared",
    "per_rank_dataset",
    "row_count",
    "share_dataset",
    "static_rows",
    "take_chunk",
]
