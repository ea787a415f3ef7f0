"""Adding up by index."""

from __future__ import annotations

from typing import Any

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.dims import number_of
from keras_ddl.cut.registry import rule
from keras_ddl.cut.states import PARTIAL, Rows, Whole

FEWER_BYTES = "gradients of a table's rows, fewer bytes than the table"
_USUAL_BYTES = 4 << 20  # of the rows of a batch, where its extents are open


@rule("UnsortedSegmentSum")
def segment_sum(b: Any, node: Any) -> Any:
    """Rows added up by index: each rank adds up its own. Where all rows are fewer bytes to move, they travel."""
    data, ids, count = node.inputs
    dims = [b.dims(data), b.dims(ids)]
    rows = next((b.state(each) for each in (ids, data) if isinstance(b.state(each), Rows)), None)
    if rows is None or None in dims or rows.axis >= len(dims[1]):
        return None
    if not b.fits(data, rows) or not b.fits(ids, rows) or not isinstance(b.state(count), Whole):
        return None
    table = node.outputs[0]
    if not is_cheaper_summed(dims[0], b.dims(table), data.dtype) and not _is_added_to_a_part(b, table):
        b.report.means(node, FEWER_BYTES)
        return None
    return [(b.make(node, [b.cut(data, rows), b.cut(ids, rows), b.whole(count)])[0], PARTIAL)]


def is_cheaper_summed(rows: Any, table: Any, dtype: tf.DType) -> bool:
    """Whether a table of sums is fewer bytes to move than the rows that it is made of.

    A sum over ranks sends what it sums twice, gathered rows go once. Of open extents a usual batch is supposed.
    """
    sizes = [number_of(each) for each in (rows, table)]
    if sizes[1] is None:
        return True
    return 2 * sizes[1] < (sizes[0] if sizes[0] is not None else _USUAL_BYTES // dtype.size)


def _is_added_to_a_part(b: Any, value: Any) -> bool:
    """Whether it is added to what has to be summed over ranks anyway, as where a table is multiplied, too."""
    others = [
        each
        for reader in b.program.readers(value)
        if reader is not None and reader.type in ("AddN", "AddV2")
        for each in reader.inputs
        if each is not value
    ]
    return any(b.is_made(each) and b.state(each) == PARTIAL for each in others)
