"""Rows of several look-ups in one table, which a backward pass puts one after another: the rows of each look-up go to
their owners, and each owner puts together what it receives, in the order of one process.

The operation that would put them together is not built, nor what is computed from its result entry by entry (`JOINED`).
The parts may be sharded in different ways; of a replicated part each owner takes its own rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.analysis.dims import if_certain
from keras_ddl.cut.analysis.placements import (
    JOINED,
    PARTIAL,
    REPLICATED,
    Partial,
    Pending,
    PlacedOutputs,
    PlacedTensor,
    Placement,
    Sharded,
)
from keras_ddl.cut.analysis.program import Node, Value
from keras_ddl.cut.operations.context import Context
from keras_ddl.cut.shards import segment_rows
from keras_ddl.cut.shards.shard_plan import computes_rows, expands_indices, joins_rows, keeps_rows
from keras_ddl.cut.shards.table_rows import Arrived, TableRows
from keras_ddl.cut.values.layouts import Layout


class _Joined(NamedTuple):
    """A value that is not built.

    Attributes:
        node: the operation that would build the value.
        operands: the values that it concatenates, or computes from.
        is_own: whether `node` is in this program, not in the one around it.
        output: which output of `node` the value is.
        layout: the layout of the table for which `node` adds up rows by index; its operands are then the indices and
            the rows. None: it adds up nothing.
        distinct: the indices of the sums, each once.
    """

    node: Node
    operands: tuple[Value, ...]
    is_own: bool = True
    output: int = 0
    layout: Layout | None = None
    distinct: Value | None = None

    @property
    def is_computed(self) -> bool:
        return self.node.type != "ConcatV2" and self.layout is None


class JoinedRows:
    """The joined values of one context. Its methods may raise Pending.

    Args: apply_rules: builds an operation whose operands are built. keep: places an output that was built.
    """

    def __init__(
        self,
        context: Context,
        rows: TableRows,
        apply_rules: Callable[[Node], PlacedOutputs],
        keep: Callable[[Value, tf.Tensor, Placement], None],
    ) -> None:
        self._b, self._rows, self._apply_rules, self._keep = context, rows, apply_rules, keep
        self._joined: dict[Value, _Joined] = {}
        self._lent: dict[Value, Value] = {}  # by the value of the graph around this one
        self._summed: dict[tuple[Value, ...], Arrived] = {}  # by operands

    # ---- not to build

    def join(self, node: Node, table: tf.TensorSpec) -> PlacedOutputs | None:
        """Returns a placeholder for what an operation puts together for a table, or computes from that; None: the
        operation is to be built."""
        b = self._b
        if keeps_rows(node) and b.placement(node.inputs[0]) == JOINED:
            return b.forward(node)
        if node.type in segment_rows.SUMS:
            return if_certain(self._join_sums, node, table)
        if joins_rows(node):
            operands = tuple(node.inputs[:-1])
            if not self._moves_less(operands, table):
                return None
        elif (computes_rows(node) or expands_indices(node)) and any(
            b.placement(each) == JOINED for each in node.inputs
        ):
            operands = tuple(node.inputs)
        else:
            return None
        self._hold(node.outputs[0], _Joined(node, operands))
        return [(tf.zeros([0], node.outputs[0].dtype), JOINED)]

    def _join_sums(self, node: Node, table: tf.TensorSpec) -> PlacedOutputs | None:
        """Returns placeholders for the rows of a gradient that an operation adds up by index, and their indices."""
        b, layout = self._b, self._rows.layout_of(table.shape)
        found = segment_rows.sums(b, self._rows, node) if layout is not None else None
        if found is None:
            return None
        for value in node.outputs:
            joined = _Joined(
                node, (found.indices, found.rows), output=value.index, layout=layout, distinct=found.distinct
            )
            self._hold(value, joined)
        return [(tf.zeros([0], each.dtype), JOINED) for each in node.outputs]

    def _hold(self, value: Value, joined: _Joined) -> None:
        self._joined[value] = joined
        self._b.register_replicator(value, lambda: self._replicated(joined))

    def _moves_less(self, parts: Sequence[Value], table: tf.TensorSpec) -> bool:
        """Whether parts can go to a table's owners, and take fewer bytes than what a rank lacks of the table."""
        b, layout = self._b, self._rows.layout_of(table.shape)
        sharded = [each for each in parts if isinstance(b.placement(each), Sharded) or b.placement(each) == JOINED]
        if layout is None or not sharded or not all(_has_whole_rows(b.placement(each)) for each in parts):
            return False
        extents = [if_certain(b.dims, each) for each in sharded]
        return self._rows.takes_less([None if each is None else each[0] for each in extents], layout, table.dtype)

    def lend(self, value: Value, outer: Value, around: JoinedRows, lend: Callable[[Value, Value], None]) -> None:
        """Lets `value` stand for a joined value of the graph around this one. lend: does so for values that are
        built."""
        joined = around._joined[around._b.origin(outer)]
        inner = []
        for each in joined.operands:
            if each not in self._lent:
                self._lent[each] = Value(each.tensor, each.node, each.index)
                lend(self._lent[each], each)
            inner.append(self._lent[each])
        self._hold(value, joined._replace(operands=tuple(inner), is_own=False))

    def _replicated(self, joined: _Joined) -> tf.Tensor:
        tensors = self._b.all_replicated(joined.operands)
        if joined.layout is not None:
            indices = tf.unique(tf.sort(tensors[0])).y
            places = tf.searchsorted(indices, tensors[0])
            return indices if joined.output else tf.math.unsorted_segment_sum(tensors[1], places, tf.size(indices))
        return self._b.make(joined.node, tensors)[0] if joined.is_computed else tf.concat(tensors, axis=0)

    def build(self, values: Sequence[Value]) -> None:
        """Builds those of some values that are joined, because something needs them as a whole."""
        b = self._b
        for value in map(b.origin, values):
            joined = self._of(value)
            if joined is not None and joined.is_own:
                self.build(joined.operands)
                tensor, placement = self._apply_rules(joined.node)[joined.output]
                self._keep(value, tensor, placement)
                b.place_again({value: PlacedTensor(tensor, placement)})

    def _of(self, value: Value) -> _Joined | None:
        return self._joined.get(self._b.origin(value)) if self._b.placement(value) == JOINED else None

    # ---- at the owners

    def arrived(self, node: Node, ids: Value, rows: Value, layout: Layout) -> Arrived | None:
        """Returns the rows that ranks have for this rank; None: they are to be added up otherwise."""
        of_ids, of_rows = self._of(ids), self._of(rows)
        if of_rows is not None and of_rows.is_computed:
            tensors = self._numbers(of_rows)
            (before,) = {self._b.origin(each) for each in of_rows.operands if each not in tensors}
            arrived = self.arrived(node, ids, before, layout)
            if arrived is None:
                return None
            operands = [tensors.get(each, arrived.rows) for each in of_rows.operands]
            return Arrived(arrived.places, self._b.make(of_rows.node, operands)[0])
        if of_rows is not None and of_rows.layout is not None:
            is_same = self._rows.before_reshape(ids) is of_rows.distinct
            is_same = is_same or of_ids is not None and of_ids.node is of_rows.node
            return self._sums(of_rows, layout) if is_same and of_rows.layout == layout else None
        if of_ids is None and of_rows is None:
            return self._rows.arrived(node, ids, rows, layout)
        if of_ids is None and joins_rows(self._b.origin(ids).node):
            of_ids = _Joined(node, tuple(self._b.origin(ids).node.inputs[:-1]))  # which all ranks have
        if of_ids is None or of_rows is None or len(of_ids.operands) != len(of_rows.operands):
            return None
        found: list[Arrived] = []
        pending: Pending | None = None
        for pair in zip(of_ids.operands, of_rows.operands):
            try:
                arrived = self.arrived(node, *pair, layout)
            except Pending as error:  # the others are requested, too, so that all travel together
                pending = error
                continue
            if arrived is None:
                return None
            found.append(arrived)
        if pending is not None:
            raise pending
        return Arrived(*(tf.concat(each, axis=0) for each in zip(*found)))

    def _sums(self, joined: _Joined, layout: Layout) -> Arrived | None:
        """Returns the sums of the rows for this rank by index, each index once."""
        key = joined.operands
        if key not in self._summed:
            indices, added = joined.operands
            arrived = self._rows.arrived(joined.node, indices, added, layout)
            if arrived is None:
                return None
            places, at = tf.unique(arrived.places)
            rows = tf.math.unsorted_segment_sum(arrived.rows, at, tf.size(places))
            self._summed[key] = Arrived(places, rows)
        return self._summed[key]

    def _numbers(self, rows: _Joined) -> dict[Value, tf.Tensor]:
        """Returns what rows are computed with, besides other rows."""
        numbers = [each for each in rows.operands if self._of(each) is None]
        return dict(zip(numbers, self._b.all_replicated(numbers)))

    def added_up(self, node: Node) -> PlacedOutputs:
        """Returns this rank's part of the sum of all entries of joined rows, or of their squares."""
        b, others = self._b, node.inputs[1:]
        axes = b.all_replicated(others)
        return [(tf.add_n([b.make(node, [each, *axes])[0] for each in self._own_parts(node.inputs[0])]), PARTIAL)]

    def _own_parts(self, value: Value) -> list[tf.Tensor]:
        """Returns this rank's rows of each part; the first rank has those of replicated parts."""
        b, joined = self._b, self._of(value)
        assert joined is not None
        if joined.is_computed:
            tensors = self._numbers(joined)
            (before,) = {b.origin(each) for each in joined.operands if each not in tensors}
            parts = self._own_parts(before)
            return [b.make(joined.node, [tensors.get(each, part) for each in joined.operands])[0] for part in parts]
        if joined.layout is not None:
            sums = self._sums(joined, joined.layout)
            assert sums is not None
            return [sums.rows]
        whole = [e for e in joined.operands if self._of(e) is None and not isinstance(b.placement(e), Sharded)]
        replicated = dict(zip(whole, b.all_replicated(whole)))
        first = b.collectives.rank == 0
        parts = []
        for each in joined.operands:
            if self._of(each) is not None:
                parts += self._own_parts(each)
            else:
                own = b.local(each) if each not in replicated else replicated[each]
                parts.append(own if first or each not in replicated else own[:0])
        return parts


def _has_whole_rows(placement: Placement) -> bool:
    return (
        placement in (REPLICATED, JOINED)
        or isinstance(placement, Partial)
        or isinstance(placement, Sharded)
        and not placement.axis
    )
