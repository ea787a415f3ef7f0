"""Each rank's share of the data, taken from batches that all ranks read or that one rank reads for all.

The Strategy calls these functions; your own input pipelines may, too.
"""

from keras_ddl.data.files import from_files
from keras_ddl.data.per_rank import PerRankDataset, per_rank_dataset
from keras_ddl.data.rows import chunk, gather_rows, row_count, take_chunk
from keras_ddl.data.share import is_shared, share_dataset
from keras_ddl.data.source import from_source

__all__ = [
    "PerRankDataset",
    "chunk",
    "from_files",
    "from_source",
    "gather_rows",
    "is_shared",
    "per_rank_dataset",
    "row_count",
    "share_dataset",
    "take_chunk",
]


def __dir__() -> list[str]:
    return sorted(__all__)
