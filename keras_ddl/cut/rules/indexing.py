"""Adding up by index."""

from __future__ import annotations

from typing import Any

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.context import Context
from keras_ddl.cut.dims import number_of
from keras_ddl.cut.placements import PARTIAL, Replicated, Sharded
from keras_ddl.cut.program import Node
from keras_ddl.cut.registry import rule

FEWER_BYTES = "gradients of a table's rows, fewer bytes than the table"
_USUAL_BYTES = 4 << 20  # of the rows of a batch, where its extents are open


@rule("UnsortedSegmentSum")
def segment_sum(b: Context, node: Node) -> Any:
    """Rows added up by index: each rank adds up its own. Where all rows are fewer bytes to move, they travel."""
    data, ids, count = node.inputs
    dims = [b.dims(data), b.dims(ids)]
    rows = next((b.placement(each) for each in (ids, data) if isinstance(b.placement(each), Sharded)), None)
    if rows is None or None in dims or rows.axis >= len(dims[1]):
        return None
    if not b.can_shard(data, rows) or not b.can_shard(ids, rows) or not isinstance(b.placement(count), Replicated):
        return None
    table = node.outputs[0]
    if not is_cheaper_summed(dims[0], b.dims(table), data.dtype) and not _is_added_to_a_part(b, table):
        b.report.intends_gather(node, FEWER_BYTES)
        return None
    return [(b.make(node, [b.sharded(data, rows), b.sharded(ids, rows), b.replicated(count)])[0], PARTIAL)]


def is_cheaper_summed(rows: Any, table: Any, dtype: tf.DType) -> bool:
    """Whether a table of sums is fewer bytes to move than the rows that it is made of.

    A sum over ranks sends what it sums twice, gathered rows go once. Of open extents a usual batch is supposed.
    """
    sizes = [number_of(each) for each in (rows, table)]
    if sizes[1] is None:
        return True
    return 2 * sizes[1] < (sizes[0] if sizes[0] is not None else _USUAL_BYTES // dtype.size)


def _is_added_to_a_part(b: Context, value: Any) -> bool:
    """Whether it is added to what has to be summed over ranks anyway, as where a table is multiplied, too."""
    others = [
        each
        for reader in b.program.readers(value)
        if reader is not None and reader.type in ("AddN", "AddV2")
        for each in reader.inputs
        if each is not value
    ]
    return any(b.is_placed(each) and b.placement(each) == PARTIAL for each in others)
