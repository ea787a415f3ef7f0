"""Builds operations on variables in flat shards (values/layouts.py).

Entrywise operations are built of chunks, and reductions of chunks give parts. A weight that is assigned a shard is not
written at once: what follows in the step reads the new shard, and the weight is gathered when something needs all of
it, at the latest at the end. So a weight that is decayed, updated and averaged in one step travels once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple

from keras_ddl.compat import tensorflow as tf_compat
from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.analysis.dims import certain, if_certain
from keras_ddl.cut.analysis.placements import (
    FLAT_SHARD,
    JOINED,
    PARTIAL,
    REPLICATED,
    Partial,
    Pending,
    PlacedOutputs,
    Placement,
    Sharded,
)
from keras_ddl.cut.analysis.program import BRANCHES, LOOPS, PYTHON_FUNCTIONS, SHAPE_OPS, Node, Value
from keras_ddl.cut.analysis.variable_ops import ASSIGN, ASSIGN_ADD, ASSIGNS, READ, ROW_UPDATES, read
from keras_ddl.cut.operations import segments
from keras_ddl.cut.operations.context import Context
from keras_ddl.cut.operations.factors import HALF, Kind, kind_of, spec_of
from keras_ddl.cut.operations.propagation import of_parts
from keras_ddl.cut.shards import row_order, segment_rows, table_operations
from keras_ddl.cut.shards.gathered_weights import GatheredWeights
from keras_ddl.cut.shards.joined_rows import JoinedRows
from keras_ddl.cut.shards.shard_plan import Plan, adds_up_rows, is_operand, reduces_all
from keras_ddl.cut.shards.table_rows import TableRows
from keras_ddl.cut.values.flat_shards import refusal
from keras_ddl.cut.values.layouts import Layout


class NewWeight(NamedTuple):
    """The flat shard that was assigned to a weight, from which the weight will be gathered."""

    value: Value
    handle: tf.Tensor
    before: list[tf.Operation]


class Sharding:
    """The variables in flat shards of one context, and the weights that are updated from them.

    apply_rules: builds an operation whose operands are not in flat shards. keep: places an output that was built.
    Attributes: is_on: whether anything of this context is in flat shards.
    """

    def __init__(
        self,
        context: Context,
        apply_rules: Callable[[Node], PlacedOutputs],
        keep: Callable[[Value, tf.Tensor, Placement], None],
    ) -> None:
        self._b = context
        self._apply_rules = apply_rules
        self._weights: set[Value] = set()
        self._gathered = GatheredWeights(context, apply_rules)
        self._rows = TableRows(context)
        self._joined = JoinedRows(context, self._rows, apply_rules, keep)
        self._handles: set[Value] = set()
        self.is_on = False
        self._plan: Plan | None = None
        self._new: dict[Hashable, NewWeight] = {}  # by reference to the handle
        self._written: dict[Hashable, tf.Operation] = {}  # the assignments built here

    def hold(self, value: Value) -> None:
        """Notes a variable in flat shards, or a value of the surrounding graph that is in flat shards."""
        self.is_on = True
        if value.dtype == tf.resource:
            self._handles.add(value)

    def hold_weight(self, handle: Value) -> None:
        """Makes a variable in flat shards be gathered temporarily wherever a complete one is needed."""
        self._weights.add(handle)

    def lend_joined(self, value: Value, outer: Value, around: Sharding, lend: Callable[[Value, Value], None]) -> None:
        """Lets `value` stand for joined rows of the graph around this one; see `JoinedRows.lend`."""
        self._joined.lend(value, outer, around._joined, lend)

    def is_weight(self, handle: Value) -> bool:
        return handle in self._weights

    def before(self, node: Node) -> list[Node]:
        """Returns the operations that give the ids by which looked-up rows are combined later.

        The ids say which rows a rank needs. So do other values that they combine, such as weights."""
        if not self.is_on or node.type not in segments.LOOK_UPS or node.inputs[1].rank != 1:
            return []
        program = self._b.program
        for later in segments.combined_later(program, node.outputs[0]):
            if segments.can_be_before(later.inputs[1].node, node):
                others = [each.node for each in segments.combined_by(program, later.inputs[1])]
                return [later.inputs[1].node, *(each for each in others if segments.can_be_before(each, node))]
        return []

    def is_towards(self, value: Value) -> bool:
        """Whether a value leads to a variable in flat shards entry by entry, so that parts of it are scattered instead
        of summed."""
        return self.is_on and value in self.plan.towards

    @property
    def plan(self) -> Plan:
        if self._plan is None:
            b = self._b
            numbers = {each: if_certain(b.extents.constants, each) for each in b.program.placeholders}
            self._plan = Plan(b.program, self._handles, {k: v for k, v in numbers.items() if v is not None})
        return self._plan

    # ---- one operation

    def make(self, node: Node) -> PlacedOutputs | None:
        """Builds an operation on flat shards; returns None for other operations, whose operands are then not in flat
        shards.

        Raises: Pending.
        """
        b = self._b
        handles = [each for each in node.inputs if each.dtype == tf.resource]
        has_shards = any(b.placement(each) == FLAT_SHARD for each in handles)
        if b.in_loop and has_shards and node.type not in (*_PASSED, *LOOPS):
            if node.type != READ:
                raise refusal(node, b.collectives.rank)
            return [(b.read_before_loop(node.inputs[0], node), REPLICATED)]
        if node.type == READ and (b.placement(node.inputs[0]) == FLAT_SHARD or self._key(node.inputs[0]) in self._new):
            return self._read(node)
        if node.type in ASSIGNS and b.placement(node.inputs[0]) == FLAT_SHARD:
            b.make(node, [b.local(node.inputs[0]), b.redistributed(node.inputs[1], FLAT_SHARD)])
            return []
        if node.type in ASSIGNS and self._assign(node):
            return []
        if node.type in ROW_UPDATES and b.placement(node.inputs[0]) == FLAT_SHARD:
            return self._scatter(node)
        sees_all = node.type in PYTHON_FUNCTIONS
        keys = [*self._new, *self._written] if sees_all else [self._key(each) for each in handles]
        self._write([each for each in keys if each in self._new])
        written = [self._written[each] for each in keys if each in self._written]
        with tf.control_dependencies(list(dict.fromkeys(written))):
            if node.type in _PASSED:
                return None
            is_look_up = node.type == "ResourceGather" and not node.attr("batch_dims", int)
            if (is_look_up or node.type == "ResourceGatherNd") and handles[0] in self._weights:
                return self._look_up(node)
            result = self._of_rows(node)
            if result is None:
                if kind_of(node) is not Kind.FORWARD:
                    self._joined.build(node.inputs)
                result = self._of_chunks(node)
            if result is not None:
                self._gathered.hold_outputs(node, result)
                return result
            self._settle(node)
            if any(map(self._gathered.has, node.inputs)):
                if kind_of(node) is not Kind.FORWARD:
                    return self._gathered.make(node)
                result = self._apply_rules(node)
                self._gathered.hold_outputs(node, result)
                return result
            # Built here, where it waits for the writes.
            return self._apply_rules(node) if written else None

    def _read(self, node: Node) -> PlacedOutputs:
        b, handle = self._b, node.inputs[0]
        new = self._new.get(self._key(handle))
        if handle in self._weights:
            self._gathered.hold(node.outputs[0])
        return [(b.make(node, [b.local(handle)])[0] if new is None else b.local(new.value), FLAT_SHARD)]

    def _key(self, handle: Value) -> Hashable:
        """Returns a key for a variable's handle, because a branch may be given a variable twice."""
        key: Hashable = self._b.local(handle).ref()
        return key

    def _assign(self, node: Node) -> bool:
        """Keeps the shard that a weight is assigned. False: it is assigned a replicated tensor."""
        b = self._b
        handle, value = node.inputs
        key, of_shard = self._key(handle), b.placement(value) == FLAT_SHARD
        if b.placement(handle) != REPLICATED or not (of_shard or key in self._new):
            return False
        if node.type == ASSIGN:
            if not of_shard:
                tensor = b.replicated(value)
                del self._new[key]  # nothing will read it
                b.make(node, [b.local(handle), tensor])
                return True
            chunk = b.local(value)
        else:
            change = b.redistributed(value, FLAT_SHARD)
            old = b.local(self._new[key].value) if key in self._new else self._own_chunk(node)
            chunk = old + change if node.type == ASSIGN_ADD else old - change
        written = [self._written[key]] if key in self._written else []
        before = [*b.before, *b.operations_so_far(), *written]
        self._new[key] = NewWeight(b.new_value(node, value.tensor, chunk, FLAT_SHARD), b.local(handle), before)
        return True

    def _own_chunk(self, node: Node) -> tf.Tensor:
        b = self._b
        handle, value = node.inputs
        if b.writes is not None and not b.writes.is_early(b.local(handle)):
            tensor = b.writes.value(b.local(handle), value.dtype)
        else:
            written = self._written.get(self._key(handle))
            with tf.control_dependencies([] if written is None else [written]):
                tensor = tf.raw_ops.ReadVariableOp(resource=b.local(handle), dtype=value.dtype)
            b.ran(tensor.op)
        tensor.set_shape(value.shape)
        return b.layout(value).cut(tensor, b.collectives.rank)

    def _of_chunks(self, node: Node) -> PlacedOutputs | None:
        b = self._b
        placements = [b.placement(each) for each in node.inputs]
        has_shards = FLAT_SHARD in placements
        parts = [each for each in node.inputs if b.placement(each) == PARTIAL and each in self.plan.towards]
        kind = kind_of(node)
        if kind is Kind.REDUCTION and (has_shards or parts and not spec_of(node).linear.at):
            return self._reduced(node) if reduces_all(node) else self._reduced_rows(node) if has_shards else None
        output = node.outputs[0] if len(node.outputs) == 1 else None
        if output is not None and node.type == "Fill" and (output in self.plan.only or output in self.plan.reduced):
            count = b.layout(output).chunk(b.collectives.rank)[1]
            return [(tf.fill([count], b.replicated(node.inputs[1])), FLAT_SHARD)]
        if output is None or not has_shards and output not in self.plan.towards and not parts:
            return None
        if kind is not Kind.ENTRYWISE or not _is_entrywise(node):
            return None
        are_replicated = all(each == REPLICATED for each in placements)
        if not has_shards and not parts and not (output in self.plan.only and are_replicated):
            return None
        if PARTIAL in placements and not has_shards and self._goes_on_as_part(node):
            result = if_certain(of_parts, b, node)
            if result is not None:
                return result
        return [(self._entrywise(node), FLAT_SHARD)]

    def _goes_on_as_part(self, node: Node) -> bool:
        """Whether to sum after an operation instead of before it: if this takes no additional sum."""
        readers = [self._b.program.readers(each) for each in node.inputs if self._b.placement(each) == PARTIAL]
        return node.type == "Cast" or len(readers) > 1 or all(len(each) == 1 for each in readers)

    def _entrywise(self, node: Node) -> tf.Tensor:
        b = self._b
        operands = [each for each in node.inputs if is_operand(each, node)]
        shards = dict(zip(operands, b.all_redistributed(operands, FLAT_SHARD)))
        numbers = [each for each in node.inputs if each not in shards]
        shards.update((each, tf.reshape(tensor, [])) for each, tensor in zip(numbers, b.all_replicated(numbers)))
        return b.make(node, [shards[each] for each in node.inputs])[0]

    def _reduced(self, node: Node) -> PlacedOutputs:
        b, value = self._b, node.inputs[0]
        chunk, output = b.redistributed(value, FLAT_SHARD), node.outputs[0]
        if node.type == "L2Loss":
            return [(b.make(node, [chunk])[0], PARTIAL)]
        if node.type == "Mean":  # in float32 for 16-bit floats, whose range may not hold the sum or the count
            wide = tf.float32 if value.dtype in HALF else value.dtype
            result = tf.reduce_sum(tf.cast(chunk, wide)) / tf.cast(value.shape.num_elements(), wide)
            result = tf.cast(result, value.dtype)
        else:
            result = b.make(node, [chunk, tf.constant([0], node.inputs[1].dtype)], keep_dims=_FALSE)[0]
        return [(tf.reshape(result, output.shape), Partial(certain(spec_of(node).combine)))]

    def _reduced_rows(self, node: Node) -> PlacedOutputs | None:
        """Reduces the rows of a matrix, each where it is. None: not along the last axis."""
        b, value, output = self._b, node.inputs[0], node.outputs[0]
        axes = if_certain(b.extents.constants, node.inputs[1]) if len(node.inputs) == 2 else None
        if axes not in ([1], [-1]) or self._rows.layout_of(value.shape) is None or not output.shape.is_fully_defined():
            return None
        layout = b.layout(value)
        rows = tf.reshape(b.local(value), [layout.rows_of(b.collectives.rank)[1], layout.unit])
        return [(tf.reshape(b.make(node, [rows, b.replicated(node.inputs[1])])[0], [-1]), FLAT_SHARD)]

    def _scatter(self, node: Node) -> PlacedOutputs:
        """Scatters rows into the entries of a table that lie on this rank."""
        b = self._b
        handle, indices, updates = node.inputs
        shape = tf_compat.variable_shape(handle.tensor)
        assert shape is not None
        width, layout = shape.num_elements() // shape.as_list()[0], self._rows.layout_of(shape)
        arrived = None if layout is None else self._joined.arrived(node, indices, updates, layout)
        if layout is not None and arrived is not None:
            count = layout.rows_of(b.collectives.rank)[1]
            if b.writes is not None and b.writes.scatter_rows(node, b.local(handle), *arrived, count):
                return []
            entries, rows = row_order.entries(arrived.places, width), arrived.rows
        else:
            b.all_replicated([indices, updates])
            first, count = Layout(tuple(shape.as_list()), b.collectives.size).chunk(b.collectives.rank)
            at = tf.reshape(b.replicated(indices), [-1])
            # An index outside of the table stays outside of this rank's part, so that it is an error on all ranks.
            is_outside = ((at < 0) | (at >= shape.as_list()[0]))[:, tf.newaxis]
            entries = tf.where(is_outside, tf.constant(count, tf.int64), row_order.entries(at, width) - first)
            mine = tf.where(((entries >= 0) & (entries < count)) | is_outside)
            rows = tf.gather_nd(tf.reshape(b.replicated(updates), [-1, width]), mine)
            entries = tf.gather_nd(entries, mine)
        operands = [b.local(handle), entries, rows]
        b.make(node, operands, Tindices=tf.compat.v1.AttrValue(type=tf.int64.as_datatype_enum))
        return []

    def _of_rows(self, node: Node) -> PlacedOutputs | None:
        """Looks up rows of a table in flat shards, or adds up rows on their way to one, where the rows are."""
        read = [each for each in node.outputs if self._b.program.readers(each)]
        tables = [self.plan.rows.get(each) for each in read]
        table = tables[0] if tables and None not in tables else None
        if table is not None:
            made = self._joined.join(node, table)
            if made is not None:
                return made
        if node.type in table_operations.TOWARDS_TABLES:
            goes_on = node.outputs[0] in self.plan.only or node.outputs[0] in self.plan.reduced
            return table_operations.add_up(self._b, self._rows, self._joined, node) if goes_on else None
        if adds_up_rows(node) and self._b.placement(node.inputs[0]) == JOINED:
            return self._joined.added_up(node)
        if node.inputs and self._b.origin(node.inputs[0]) in self._rows.postponed and kind_of(node) is not Kind.FORWARD:
            return segment_rows.repeated(self._b, self._rows, node)
        if node.inputs and self._b.placement(node.inputs[0]) == FLAT_SHARD:
            return table_operations.look_up(self._b, self._rows, node, node.inputs[0])
        return None

    def _look_up(self, node: Node) -> PlacedOutputs:
        """Looks up rows where they are, or the rows of a rank's own indices in a gathered table."""
        b = self._b
        handle, indices = node.inputs
        shape, dtype = tf_compat.variable_shape(handle.tensor), node.outputs[0].dtype
        if b.writes is None or b.writes.is_early(b.local(handle)):
            chunk = read(b.local(handle), dtype)
        else:
            chunk = b.writes.value(b.local(handle), dtype)
        table = b.new_value(node, tf.TensorSpec(shape, dtype), chunk, FLAT_SHARD)
        looked_up = table_operations.look_up(b, self._rows, node, table)
        if looked_up is not None:
            return looked_up
        placement, is_nd = b.placement(indices), node.type == "ResourceGatherNd"
        is_sharded = isinstance(placement, Sharded) and placement.axis < len(b.dims(indices)) - is_nd
        at = b.local(indices) if is_sharded else b.replicated(indices)

        def build(tensor: tf.Tensor) -> PlacedOutputs:
            rows = tf.gather_nd(tensor, at) if is_nd else tf.gather(tensor, at)
            b.ran(rows.op)
            return [(rows, placement if is_sharded else REPLICATED)]

        return self._gathered.make_with(table, build)

    def _settle(self, node: Node) -> None:
        """Replicates operands in flat shards of an operation without a rule."""
        b = self._b
        for value in node.inputs:
            if b.placement(value) == FLAT_SHARD and value.dtype == tf.resource and node.type not in LOOPS:
                raise refusal(node, b.collectives.rank)
        sharded = [v for v in node.inputs if b.placement(v) == FLAT_SHARD and v.dtype != tf.resource]
        sharded = [each for each in sharded if not self._gathered.has(each)]
        if kind_of(node) is not Kind.FORWARD:
            b.all_replicated(sharded)
            for value in sharded:
                b.keep_replicated(value)

    # ---- weights

    def _write(self, due: list[Hashable]) -> None:
        """Writes weights that have new shards. Raises: Pending: they have yet to be gathered."""
        b = self._b
        tensors = b.all_replicated([self._new[each].value for each in due])
        for each, tensor in zip(due, tensors):
            new = self._new.pop(each)
            with tf.control_dependencies(None), tf.control_dependencies(new.before):
                written = b.assign(ASSIGN, new.handle, tensor)
            if written is not None:
                self._written[each] = written

    def finish(self) -> bool:
        """Writes all weights. False: they have yet to be gathered."""
        try:
            self._write(list(self._new))
        except Pending:
            return False
        return True


_PASSED = (*BRANCHES, *SHAPE_OPS, "VariableShape", "VarIsInitializedOp")
_FALSE = tf.compat.v1.AttrValue(b=False)


def _is_entrywise(node: Node) -> bool:
    """Whether all operands are of the result's shape, or one number."""
    output = node.outputs[0]
    if output.rank is None or not output.shape.is_fully_defined():
        return False
    return all(
        is_operand(each, node) or each.rank is not None and each.shape.num_elements() == 1 for each in node.inputs
    ) and any(is_operand(each, node) for each in node.inputs)
