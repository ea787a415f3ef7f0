"""Looking up by index, and adding up by index."""

from __future__ import annotations

from typing import Any

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.dims import number_of
from keras_ddl.cut.registry import rule
from keras_ddl.cut.states import PARTIAL, Partial, Rows, Whole

FEWER_BYTES = "gradients of a table's rows, fewer bytes than the table"
_USUAL_BYTES = 4 << 20  # of the rows of a batch, where its extents are open


@rule("GatherV2")
def gather(b: Any, node: Any) -> Any:
    table, indices, axis = node.inputs
    at = b.constants(axis)
    dims, states = b.dims(table), (b.state(table), b.state(indices))
    if at is None or dims is None or indices.rank is None or isinstance(states[1], Partial):
        return None
    position, batch = at[0] % len(dims), node.attr("batch_dims")
    if isinstance(states[0], Partial):
        return None if not isinstance(states[1], Whole) else [(_make(b, node), states[0])]
    if batch:
        return _of_batches(b, node, position, batch % max(indices.rank, 1))
    if isinstance(states[0], Rows) and isinstance(states[1], Whole):
        if states[0].axis == position:
            return None
        moved = states[0].axis + (indices.rank - 1 if states[0].axis > position else 0)
        return [(_make(b, node), states[0].at(moved))]
    if isinstance(states[1], Rows):
        b.wholes([table])
        made = b.make(node, [b.whole(table), b.held(indices), b.whole(axis)])[0]
        return [(made, states[1].at(position + states[1].axis))]
    return None


def _make(b: Any, node: Any) -> Any:
    return b.make(node, [b.held(node.inputs[0]), b.held(node.inputs[1]), b.whole(node.inputs[2])])[0]


def _of_batches(b: Any, node: Any, position: int, batch: int) -> Any:
    """Each row looks up in its own row of the table."""
    table, indices, axis = node.inputs
    rows = next((b.state(each) for each in (table, indices) if isinstance(b.state(each), Rows)), None)
    if rows is None or rows.axis >= batch or not b.fits(table, rows) or not b.fits(indices, rows):
        return None
    return [(b.make(node, [b.cut(table, rows), b.cut(indices, rows), b.whole(axis)])[0], rows)]


@rule("OneHot")
def one_hot(b: Any, node: Any) -> Any:
    value = node.inputs[0]
    state = b.state(value)
    if not isinstance(state, Rows) or value.rank is None:
        return None
    axis = node.attr("axis") % (value.rank + 1)
    b.wholes(node.inputs[1:])
    made = b.make(node, [b.held(value), *map(b.whole, node.inputs[1:])])[0]
    return [(made, state.at(state.axis + (axis <= state.axis)))]


@rule("DenseBincount")
def bincount(b: Any, node: Any) -> Any:
    """Counts of each row [rows, n], or of all entries [n]."""
    value, size, weights = node.inputs
    state, dims = b.state(value), b.dims(value)
    if not isinstance(state, Rows) or state.axis or node.attr("binary_output") and len(dims) == 1:
        return None
    unweighted = weights.shape.num_elements() == 0 if weights.rank is not None else False
    if not unweighted and (b.dims(weights) is None or len(b.dims(weights)) != len(dims) or not b.fits(weights, state)):
        return None
    b.wholes([size])
    given = b.whole(weights) if unweighted else b.cut(weights, state)
    made = b.make(node, [b.held(value), b.whole(size), given])[0]
    return [(made, state if len(dims) == 2 else PARTIAL)]


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
