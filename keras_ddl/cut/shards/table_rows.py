"""Looks up and adds up rows of tables in flat shards where the rows are: each row of a table has one owner.

For a look-up, a rank sends each owner the indices that it needs, each once, and receives the rows. For a gradient, rows
travel to their owners in the order of the batch, because the rows of the ranks lie one after another. An owner adds
them in this order, as one process does. No rank has more of a table, or of the table's gradient, than its chunk.

A table that takes fewer bytes than these rows is gathered. So is a table of more or fewer axes than two, and a table in
a loop, which can have no collective.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.analysis.dims import Dim, if_certain
from keras_ddl.cut.analysis.placements import PARTIAL, REPLICATED, PlacedOutputs, Sharded
from keras_ddl.cut.analysis.program import Node, Value
from keras_ddl.cut.operations.context import Context
from keras_ddl.cut.operations.factors import Kind, kind_of
from keras_ddl.cut.values.layouts import Layout
from keras_ddl.cut.values.row_exchange import SentRows

# Where extents are open: the lines of a batch, and the bytes of rows whose number does not follow from these lines.
USUAL_LINES, USUAL_BYTES = 4096, 4 << 20
_ID_BYTES = 8  # at most


class _Sorted(NamedTuple):
    """Indices of rows, sorted by owner. `order`: where they were before. sent: how many rows each owner has."""

    ids: tf.Tensor
    order: tf.Tensor
    sent: tf.Tensor


class _Route(NamedTuple):
    """The way of some rows from this rank to their owners.

    Attributes: sorted: the rows in the order in which they are sent. received: how many come from each rank. places:
        of the received rows in this rank's chunk.
    """

    sorted: _Sorted
    received: tf.Tensor
    places: tf.Tensor


class Arrived(NamedTuple):
    """Rows of a table at the rank that owns them. `places`: of the rows in the rank's chunk."""

    places: tf.Tensor
    rows: tf.Tensor


class _Wanted(NamedTuple):
    """The rows of a table that this rank looks up. `ids`: each once. `at`: where each looked-up row is among them, in
    their order by owner."""

    ids: _Sorted
    at: tf.Tensor


class TableRows:
    """Moves rows of the tables in flat shards of one context. Its methods are collective, and may raise Pending."""

    def __init__(self, context: Context) -> None:
        self._b = context
        self.made: dict[Node, Value] = {}  # values that are not the program's, by the operation that they are for
        self._wanted: dict[Hashable, _Wanted] = {}
        self._sorted: dict[Hashable, _Sorted] = {}
        self._routes: dict[Hashable, _Route] = {}
        self._arrived: dict[Hashable, tf.Tensor] = {}

    def look_up(self, node: Node, table: Value, indices: Value) -> PlacedOutputs | None:
        """Returns the rows of a table at some indices; None: the table is to be gathered."""
        b, layout = self._b, self.layout_of(table.shape)
        if layout is None:
            return None
        if not self.moves_less(indices, layout, table.dtype):
            b.report.intends_gather(node, "a table of fewer bytes than the rows")
            return None
        key = b.origin(indices), b.placement(indices), layout.rows
        if key not in self._wanted:
            self._wanted[key] = self._wanted_at(indices, layout)
        ids, at = self._wanted[key]
        placement = b.placement(indices)
        entry, total = layout.unit * table.dtype.size, layout.bytes(table.dtype)

        def own(places: tf.Tensor) -> tf.Tensor:
            return tf.gather(tf.reshape(b.local(table), [layout.rows_of(b.collectives.rank)[1], layout.unit]), places)

        if isinstance(placement, Sharded):
            route = self._route((*key, "look-up"), node, indices, ids, layout)
            rows = b.requests.exchange(
                (node, "look-up"),
                lambda: SentRows(own(route.places), route.received, ids.sent, node, indices, entry, total),
            ).rows
        else:
            mine = tf.split(ids.ids, ids.sent, num=layout.size)[b.collectives.rank]
            rows = b.collectives.gather(own(self._places(mine, layout)), b.next_name("rows"))
            b.report.gathered_rows(node, indices, entry, total)
        result = tf.gather(rows, at)
        b.ran(result.op)
        return [(result, placement if isinstance(placement, Sharded) else REPLICATED)]

    def arrived(self, node: Node, ids: Value, rows: Value, layout: Layout) -> Arrived | None:
        """Returns the rows that ranks have for this rank, in the order of the batch; None: they are sharded in another
        way than their indices."""
        b = self._b
        placement = if_certain(sharding_of_rows, b, ids, rows)
        if placement is not None:
            return self._at_owners(node, ids, rows, placement, layout)
        if any(isinstance(b.placement(each), Sharded) for each in (ids, rows)):
            return None
        b.all_replicated([ids, rows])
        at, rows_of_all = tf.reshape(b.replicated(ids), [-1]), tf.reshape(b.replicated(rows), [-1, layout.unit])
        places = self.own_places(_as_index(at), layout)
        # An index that no row has stays one, so that it is an error on all ranks where one process raises it.
        mine = tf.where((places >= 0) | (at < 0))
        return Arrived(tf.gather_nd(places, mine), tf.gather_nd(rows_of_all, mine))

    # ---- whether

    def layout_of(self, shape: tf.TensorShape) -> Layout | None:
        """Returns the layout of a table whose rows have owners; None: it is another tensor."""
        if self._b.in_loop or shape.rank != 2 or not shape.is_fully_defined():
            return None
        layout = Layout(tuple(shape.as_list()), self._b.collectives.size)
        return layout if layout.rows == shape[0] >= layout.size and layout.unit == shape[1] else None

    def moves_less(self, indices: Value, layout: Layout, dtype: tf.DType) -> bool:
        """Whether rows at some indices, with the indices, take fewer bytes than what a rank lacks of a table."""
        is_sharded = isinstance(self._b.placement(indices), Sharded)
        return self.takes_less([if_certain(self._b.extents.size, indices)], layout, dtype, is_sharded=is_sharded)

    def takes_less(
        self, counts: Sequence[Dim | None], layout: Layout, dtype: tf.DType, *, is_sharded: bool = True
    ) -> bool:
        """Whether these numbers of rows, with their indices, take fewer bytes than what a rank lacks of a table."""
        row = layout.unit * dtype.size + _ID_BYTES
        moved = 0
        for count in counts:
            if count is not None and all(each.kind == "rows" for each in count.unknowns):
                moved += count.factor * USUAL_LINES ** len(count.unknowns) * row
            else:
                moved += USUAL_BYTES
        others = layout.size - 1 if is_sharded else 1  # each rank needs a share
        return moved < others * layout.bytes(dtype)

    # ---- ways

    def _wanted_at(self, indices: Value, layout: Layout) -> _Wanted:
        b = self._b
        is_sharded = isinstance(b.placement(indices), Sharded)
        at = _as_index(b.local(indices) if is_sharded else b.replicated(indices))
        existing = tf.clip_by_value(at, 0, layout.rows - 1)
        distinct, place = tf.unique(tf.reshape(existing, [-1]))
        ids = _by_owner(distinct, layout)
        place = tf.reshape(tf.gather(tf.math.invert_permutation(ids.order), place), tf.shape(at))
        # An index that no row has stays out of range, so that the look-up fails as in one process.
        return _Wanted(ids, tf.where(at == existing, tf.cast(place, at.dtype), at))

    def _at_owners(self, node: Node, ids: Value, rows: Value, placement: Sharded, layout: Layout) -> Arrived:
        b = self._b
        key = b.origin(ids), placement, layout.rows
        if key not in self._sorted:
            self._sorted[key] = _by_owner(_as_index(tf.reshape(b.redistributed(ids, placement), [-1])), layout)
        route = self._route(key, node, ids, self._sorted[key], layout)
        return Arrived(route.places, self._arrived_rows(node, b.origin(rows), placement, route, layout))

    def _arrived_rows(self, node: Node, rows: Value, placement: Sharded, route: _Route, layout: Layout) -> tf.Tensor:
        """Returns rows at their owners. What is computed from other rows entry by entry, as their squares for Adam, is
        computed from those at the owner: they travel once."""
        b = self._b
        key = rows, id(route)
        if key in self._arrived:
            return self._arrived[key]
        before = self._computed_from(rows, placement)
        if before is not None:
            operands = [
                self._arrived_rows(node, before, placement, route, layout) if each.rank else b.replicated(each)
                for each in rows.node.inputs
            ]
            self._arrived[key] = b.make(rows.node, operands)[0]
            return self._arrived[key]

        def sent() -> SentRows:
            local = tf.gather(tf.reshape(b.redistributed(rows, placement), [-1, layout.unit]), route.sorted.order)
            total = layout.bytes(rows.dtype)
            return SentRows(local, route.sorted.sent, route.received, node, rows, rows.dtype.size, total)

        return b.requests.exchange(key, sent).rows

    def _computed_from(self, rows: Value, placement: Sharded) -> Value | None:
        """Returns the rows from which others are computed entry by entry, with numbers alone; None: not from one."""
        b, node = self._b, rows.node
        if kind_of(node) is not Kind.ENTRYWISE or not node.is_pure or len(node.outputs) != 1:
            return None
        operands = {b.origin(each) for each in node.inputs if each.rank != 0}
        before = operands.pop() if len(operands) == 1 else None
        if before is None or before.rank is None or before.dtype.size > rows.dtype.size or not b.is_placed(before):
            return None
        is_there = b.placement(before) in (REPLICATED, placement) and before.dtype.is_floating
        return before if is_there and b.dims(before) == b.dims(rows) else None

    def _route(self, key: Hashable, node: Node, indices: Value, ids: _Sorted, layout: Layout) -> _Route:
        """Returns the way of rows with these indices, which this rank has, to their owners."""
        if key not in self._routes:
            size = indices.dtype.size
            sent = self._b.requests.exchange(key, lambda: SentRows(ids.ids, ids.sent, None, node, indices, size, None))
            self._routes[key] = _Route(ids, sent.counts, self._places(sent.rows, layout))
        return self._routes[key]

    def own_places(self, ids: tf.Tensor, layout: Layout) -> tf.Tensor:
        """Returns the places of rows in this rank's chunk: -1 for rows of other ranks and negative indices, and a place
        behind the chunk for indices that are too large."""
        first, count = layout.rows_of(self._b.collectives.rank)
        other = tf.where(ids < layout.rows, tf.constant(-1, ids.dtype), tf.constant(count, ids.dtype))
        return tf.where((ids >= first) & (ids < first + count), ids - first, other)

    def _places(self, ids: tf.Tensor, layout: Layout) -> tf.Tensor:
        return ids - tf.constant(layout.rows_of(self._b.collectives.rank)[0], ids.dtype)


def _by_owner(ids: tf.Tensor, layout: Layout) -> _Sorted:
    """Sorts indices by owner; those of one owner stay in their order."""
    begins = tf.constant([layout.rows_of(rank)[0] for rank in range(1, layout.size)], ids.dtype)
    owners = tf.searchsorted(begins, ids, side="right")
    size, unweighted = tf.constant(layout.size), tf.zeros([0], tf.int64)
    sent = tf.raw_ops.DenseBincount(input=owners, size=size, weights=unweighted, binary_output=False)
    order = tf.argsort(owners, stable=True)
    return _Sorted(tf.gather(ids, order), order, sent)


def _as_index(ids: tf.Tensor) -> tf.Tensor:
    return ids if ids.dtype in (tf.int32, tf.int64) else tf.cast(ids, tf.int64)


def sharding_of_rows(b: Context, indices: Value, rows: Value) -> Sharded | None:
    """Returns how indices and their rows can be sharded alike, or None. Raises: Uncertain."""
    for value in (indices, rows):
        placement = b.placement(value)
        if isinstance(placement, Sharded):
            if placement.axis >= len(b.dims(indices)):
                return None
            return placement if b.can_shard(rows, placement) and b.can_shard(indices, placement) else None
    return None


def is_added_to_a_part(b: Context, value: Value) -> bool:
    """Whether a value is added to another one that must be summed over ranks anyway, as when a table is also
    multiplied."""
    others = [
        each
        for reader in b.program.readers(value)
        if reader.type in ("AddN", "AddV2")
        for each in reader.inputs
        if each is not value
    ]
    return any(b.is_placed(each) and b.placement(each) == PARTIAL for each in others)
