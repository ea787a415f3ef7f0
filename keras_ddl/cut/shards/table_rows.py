"""Looks up and adds up rows of tables in flat shards where the rows are: each row of a table has one owner.

For a look-up, a rank sends each owner the indices that it needs, each once, with how often it needs them, and receives
the rows. For a gradient, rows travel to the owners of their indices. Those of one index stay in the order of the batch,
because the rows of the ranks lie one after another, and an owner adds them in this order, as one process does. No rank
has more of a table, or of the table's gradient, than its chunk.

A table that takes fewer bytes than these rows is gathered. So is a table of more or fewer axes than two, and a table in
a loop, which can have no collective.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.analysis.dims import ONE, Dim, if_certain
from keras_ddl.cut.analysis.placements import PARTIAL, REPLICATED, Pending, PlacedOutputs, Placement, Sharded
from keras_ddl.cut.analysis.program import Node, Value
from keras_ddl.cut.operations import segments
from keras_ddl.cut.operations.context import Context
from keras_ddl.cut.operations.factors import Kind, kind_of
from keras_ddl.cut.shards import row_order
from keras_ddl.cut.shards.row_order import Asked, FewRows, Route, Sorted, Wanted
from keras_ddl.cut.values.layouts import Layout
from keras_ddl.cut.values.row_exchange import SentRows

# Where extents are open: the lines of a batch, and the bytes of rows whose number does not follow from these lines.
USUAL_LINES, USUAL_BYTES = 4096, 4 << 20
_ID_BYTES = 8  # at most


class _Moved(NamedTuple):
    """Rows on the way to their owners, for an operation. `ids`: their indices."""

    node: Node
    ids: Value
    route: Route
    layout: Layout


class Arrived(NamedTuple):
    """Rows of a table at the rank that owns them. `places`: of the rows in the rank's chunk."""

    places: tf.Tensor
    rows: tf.Tensor


class Repeated(NamedTuple):
    """Rows on one rank that are repeated. `of`: the value of which they are; numbers: which of them each row is."""

    of: Value
    rows: tf.Tensor
    numbers: tf.Tensor


class TableRows:
    """Moves rows of the tables in flat shards of one context. Its methods are collective, and may raise Pending."""

    def __init__(self, context: Context) -> None:
        self._b = context
        self.made: dict[Node, Value] = {}  # values that are not the program's, by the operation that they are for
        self._wanted: dict[Hashable, Wanted] = {}
        self._asked: dict[Hashable, Asked] = {}
        self._sorted: dict[Hashable, Sorted] = {}
        self._routes: dict[Hashable, Route] = {}
        self._few: dict[Hashable, FewRows] = {}
        self._arrived: dict[Hashable, tf.Tensor] = {}
        self.postponed: dict[Value, Value] = {}  # tables, by look-ups of distinct rows (segment_rows.py)
        self.repeated: dict[Value, Repeated] = {}  # by rows that repeat them

    def look_up(
        self, node: Node, table: Value, indices: Value, placement: Placement | None = None
    ) -> PlacedOutputs | None:
        """Returns the rows of a table at some indices; None: the table is to be gathered.

        placement: that of the indices and their rows; default: as the indices have it, or as their rows are combined.
        """
        b, layout = self._b, self.layout_of(table.shape)
        if layout is None:
            return None
        placement = placement or self._as_combined(node, indices) or b.placement(indices)
        if not self.moves_less(indices, layout, table.dtype, placement):
            b.report.intends_gather(node, "a table of fewer bytes than the rows")
            return None
        key = b.origin(indices), placement, layout.rows
        if key not in self._wanted:
            local = b.redistributed(indices, placement if isinstance(placement, Sharded) else REPLICATED)
            self._wanted[key] = row_order.wanted(_as_index(local), layout)
        ids, at = self._wanted[key].ids, self._wanted[key].at
        entry, total = layout.unit * table.dtype.size, layout.bytes(table.dtype)

        def own(places: tf.Tensor) -> tf.Tensor:
            return tf.gather(tf.reshape(b.local(table), [layout.rows_of(b.collectives.rank)[1], layout.unit]), places)

        if isinstance(placement, Sharded):
            asked = self._asked_for(key, node, indices, layout)
            rows = b.requests.exchange(
                (node, "look-up"),
                lambda: SentRows(own(asked.places), asked.received, ids.sent, node, indices, entry, total),
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

    def moves_less(self, indices: Value, layout: Layout, dtype: tf.DType, placement: Placement | None = None) -> bool:
        """Whether rows at some indices, with the indices, take fewer bytes than what a rank lacks of a table.

        placement: of the rows; default: of the indices.
        """
        is_sharded = isinstance(placement or self._b.placement(indices), Sharded)
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

    def _as_combined(self, node: Node, indices: Value) -> Sharded | None:
        """Returns the sharding of rows that ranks combine by segment; None: they are not, or it is not certain."""
        b = self._b
        if b.placement(indices) != REPLICATED or indices.rank != 1:
            return None
        for later in segments.combined_later(b.program, node.outputs[0]):
            placement = if_certain(segments.sharding_by, b, indices, later)
            if placement is not None:
                return placement
        return None

    # ---- ways

    def _asked_for(self, key: Hashable, node: Node, indices: Value, layout: Layout) -> Asked:
        """Tells owners which rows this rank looks up, and how often, so that gradients travel without indices."""
        if key not in self._asked:
            wanted, dtype = self._wanted[key], tf.int32 if layout.rows < 1 << 31 else tf.int64
            pairs = tf.stack([tf.cast(wanted.ids.ids, dtype), tf.cast(wanted.counts, dtype)], axis=1)
            sent = self._b.requests.exchange(
                (key, "look-up"), lambda: SentRows(pairs, wanted.ids.sent, None, node, indices, 2 * dtype.size, None)
            )
            ids, counts = tf.unstack(sent.rows, 2, axis=1)
            self._asked[key] = Asked(sent.counts, self._places(ids, layout), counts)
        return self._asked[key]

    def _at_owners(self, node: Node, ids: Value, rows: Value, placement: Sharded, layout: Layout) -> Arrived:
        b = self._b
        key = b.origin(ids), placement, layout.rows
        if key not in self._routes:
            indices, at = self.before_reshape(ids), b.placement(ids)
            # Indices that all ranks have may have been looked up as their rows are sharded.
            looked_up = indices, placement if at == REPLICATED else b.placement(indices), layout.rows
            if looked_up in self._asked and at in (placement, REPLICATED):
                self._routes[key] = row_order.way_back(self._wanted[looked_up], self._asked[looked_up])
            else:
                self._routes[key] = self._route(key, node, ids, placement, layout)
        route = self._routes[key]
        moved = _Moved(node, ids, route, layout)
        return Arrived(route.places, self._arrived_rows(moved, b.origin(rows), placement))

    def _route(self, key: Hashable, node: Node, ids: Value, placement: Sharded, layout: Layout) -> Route:
        """Returns the way of rows with these indices, whose owners do not know them."""
        b = self._b
        if key not in self._sorted:
            local = _as_index(tf.reshape(b.redistributed(ids, placement), [-1]))
            self._sorted[key] = row_order.by_owner(local, layout)
        mine, size = self._sorted[key], ids.dtype.size
        sent = b.requests.exchange(key, lambda: SentRows(mine.ids, mine.sent, None, node, ids, size, None))
        return Route(mine.order, mine.sent, sent.counts, self._places(sent.rows, layout))

    def before_reshape(self, value: Value) -> Value:
        """Returns the value that `value` only reshapes, if each rank has the same entries of both in one order."""
        b = self._b
        value = b.origin(value)
        while value.node.type == "Reshape":
            before = b.origin(value.node.inputs[0])
            dims = if_certain(b.dims, value)
            is_same = b.is_placed(before) and dims is not None and dims == if_certain(b.dims, before)
            if not is_same and not (self._is_in_rows(value) and self._is_in_rows(before)):
                break
            value = before
        return value

    def _is_in_rows(self, value: Value) -> bool:
        """Whether each rank has the entries of its rows of the batch, which lie along the first axis."""
        placement = self._b.placement(value) if self._b.is_placed(value) else None
        return isinstance(placement, Sharded) and placement.axis == 0 and placement.blocks == ONE

    # ---- rows

    def _arrived_rows(self, moved: _Moved, rows: Value, placement: Placement) -> tf.Tensor:
        """Returns rows at their owners.

        Rows computed entry by entry from other rows, such as Adam's squared gradients, are computed at the owner, so
        that the rows travel only once.
        """
        b = self._b
        key = rows, id(moved.route)
        if key not in self._arrived:
            before = self._computed_from(rows, placement)
            is_here = b.placement(rows) == placement
            reshaped = self.before_reshape(rows) if is_here else rows
            if before is not None:
                operands = [
                    self._arrived_rows(moved, before, placement) if each.rank else b.replicated(each)
                    for each in rows.node.inputs
                ]
                self._arrived[key] = b.make(rows.node, operands)[0]
            elif reshaped is not rows and self._width(reshaped) == moved.layout.unit:
                self._arrived[key] = self._arrived_rows(moved, reshaped, b.placement(reshaped))
            elif is_here and self._repeats(rows, moved.layout):
                self._arrived[key] = self._arrived_once(key, moved, rows, self.repeated[rows])
            else:
                self._arrived[key] = b.requests.exchange(key, lambda: self._sent(moved, rows, placement)).rows
        return self._arrived[key]

    def _sent(self, moved: _Moved, rows: Value, placement: Placement) -> SentRows:
        local = tf.reshape(self._b.redistributed(rows, placement), [-1, moved.layout.unit])
        in_order, route, total = tf.gather(local, moved.route.order), moved.route, moved.layout.bytes(rows.dtype)
        return SentRows(in_order, route.sent, route.received, moved.node, rows, rows.dtype.size, total)

    def _arrived_once(self, key: Hashable, moved: _Moved, rows: Value, repeated: Repeated) -> tf.Tensor:
        """Returns rows at their owners that repeat fewer rows; an owner gets each of these once."""
        b, route, layout = self._b, moved.route, moved.layout
        if key not in self._few:
            self._few[key] = row_order.few_rows(repeated.rows, repeated.numbers, route, layout)
        own, bytes_, total = self._few[key], rows.dtype.size * layout.size, layout.bytes(rows.dtype)
        sent = {
            "numbers": lambda: SentRows(own.numbers, route.sent, route.received, moved.node, moved.ids, 4, None),
            "rows": lambda: SentRows(own.rows, own.sent, None, moved.node, repeated.of, bytes_, total),
        }
        arrived = {}
        for name, each in sent.items():
            with contextlib.suppress(Pending):
                arrived[name] = b.requests.exchange((key, name), each)
        if len(arrived) < len(sent):
            raise Pending
        return row_order.of_few_rows(*arrived["rows"], arrived["numbers"].rows, route)

    def _repeats(self, rows: Value, layout: Layout) -> bool:
        """Whether rows repeat fewer rows, as the gradient of a sum over several indices does, and these rows and their
        numbers take fewer bytes."""
        b = self._b
        if rows not in self.repeated:
            by_segment = if_certain(segments.repeated, b, rows)
            if by_segment is not None:
                self.repeated[rows] = Repeated(*by_segment)
            elif self._repeats_along_axes(rows, layout):
                few = rows.node.inputs[0]
                self.repeated[rows] = Repeated(few, b.local(few), row_order.tiled(b.local(few), b.local(rows)))
        return rows in self.repeated

    def _repeats_along_axes(self, rows: Value, layout: Layout) -> bool:
        """Whether rows repeat fewer rows along axes between the first and the last, and it saves bytes to say so."""
        b, node = self._b, rows.node
        if node.type not in ("Tile", "BroadcastTo") or not rows.rank or node.inputs[0].rank != rows.rank:
            return False
        few = node.inputs[0]
        if not self._is_in_rows(rows) or not self._is_in_rows(few):
            return False
        dims = list(zip(b.dims(few), b.dims(rows)))
        if dims[0][0] != dims[0][1] or dims[-1][0] != dims[-1][1]:
            return False
        repeats = 1
        for one, many in dims[1:-1]:
            if one.number is None or many.number is None:
                return True
            repeats *= many.number // max(1, one.number)
        owners = layout.size * (1 - (1 - 1 / layout.size) ** repeats)  # of `repeats` rows, on average
        return bool((repeats - owners) * layout.unit * rows.dtype.size > repeats * tf.int32.size)

    def _width(self, value: Value) -> int | None:
        dims = if_certain(self._b.dims, value)
        return dims[-1].number if dims else None

    def _computed_from(self, rows: Value, placement: Placement) -> Value | None:
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

    def own_places(self, ids: tf.Tensor, layout: Layout) -> tf.Tensor:
        """Returns the places of rows in this rank's chunk: -1 for rows of other ranks and negative indices, and a place
        behind the chunk for indices that are too large."""
        first, count = layout.rows_of(self._b.collectives.rank)
        other = tf.where(ids < layout.rows, tf.constant(-1, ids.dtype), tf.constant(count, ids.dtype))
        return tf.where((ids >= first) & (ids < first + count), ids - first, other)

    def _places(self, ids: tf.Tensor, layout: Layout) -> tf.Tensor:
        return ids - tf.constant(layout.rows_of(self._b.collectives.rank)[0], ids.dtype)


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
