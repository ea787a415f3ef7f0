"""Each rank's share of the data, for input pipelines of one's own: keras_ddl/strategy/data/ under its public name."""

from keras_ddl.strategy.data import (
    PerRankDataset,
    chunk,
    from_files,
    from_source,
    gather_rows,
    is_shared,
    per_rank_dataset,
    row_count,
    share_dataset,
    take_chunk,
)

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
