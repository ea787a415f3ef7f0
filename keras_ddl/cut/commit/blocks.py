"""Updates large variables after a step has committed, some of their entries at a time, in the memory that they have.

An optimizer computes each entry of a weight and of its slots from entries at the same place. Updating a variable all at
once needs several tensors of its size besides the old and new values. A loop over blocks of entries needs tensors of a
block only, and overwrites old values as it computes new ones. Variables whose updates share operations, such as a
weight and its slots, share a loop.

The variables give their values to the loop. TensorFlow overwrites a value in place unless something else still uses it,
such as a checkpoint that is being written; then it copies the value first.

A sum of rows by index for such a variable, such as the gradient of a table, is computed block by block, too. Its
indices are checked before the commit, because nothing may fail afterwards.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

from keras_ddl.compat.loops import LoopGraph, while_op
from keras_ddl.compat.tensorflow import create_op, tf
from keras_ddl.cut.analysis import variable_ops
from keras_ddl.cut.commit.after_commit import ENTRYWISE, AfterCommit

_BLOCK = 1 << 18  # entries that are computed at a time
_FILLS = ("Fill", "BroadcastTo")  # of one number
_SUM = "UnsortedSegmentSum"
_LOCAL_ATTRIBUTES = ("_class", "_output_shapes")  # attributes that hold only where an operation was made
_ALIGNED = 16  # rows: blocks of a multiple are slices that TensorFlow does not copy


class New(NamedTuple):
    """A variable and the value that it will have. handle, value: tensors of the graph being built. variable: names the
    variable for the caller."""

    handle: tf.Tensor
    value: tf.Tensor
    variable: Hashable


class _Rows(NamedTuple):
    """Rows to be added up by index, sorted by index; rows of one index are in their order. `ends`: where the rows of
    each block of the sum begin, and where those of the last end."""

    rows: tf.Tensor
    ids: tf.Tensor
    ends: tf.Tensor


class Blocks:
    """Variables that one loop updates. `entries`: of each of them."""

    def __init__(self, after: AfterCommit, new: Sequence[New], names: set[str]) -> None:
        self._after, self.new = after, list(new)
        self._operations = {name: each for name, each in after.operations.items() if name in names}
        (self.entries,) = new[0].value.shape.as_list()
        self._sums: dict[str, tf.Operation] = {}

    def can_be_made(self) -> bool:
        """Whether every operation is one of entries at the same place; takes the sums by index along if so."""
        if any(each.value.shape.as_list() != [self.entries] for each in self.new):
            return False
        sums: dict[str, tf.Operation] = {}
        for operation in self._operations.values():
            if not self._has_only_readers_inside(operation) or not self._is_of_entries(operation):
                return False
            before = operation.inputs[0].op
            if operation.type == "Reshape" and before.type == _SUM and self._can_sum(before):
                sums[before.name] = before
        widths = {each.outputs[0].shape[1] for each in sums.values()}
        if len(widths) > 1:
            return False
        self._sums = sums
        for each in sums.values():
            self._after.add(each)
        return True

    def _has_only_readers_inside(self, operation: tf.Operation) -> bool:
        return all(name in self._operations for name in self._after.readers(operation))

    def _is_of_entries(self, operation: tf.Operation) -> bool:
        if [each.shape.as_list() for each in operation.outputs] != [[self.entries]]:
            return False
        operands = list(operation.inputs)
        if operation.type == "Reshape":
            return bool(operands[0].shape.num_elements() == self.entries)
        if operation.type in _FILLS:
            number = operands[1] if operation.type == "Fill" else operands[0]
            return _is_number(number) and number.op.name not in self._operations
        if operation.type not in ENTRYWISE and operation.type != "Identity":
            return False
        return all(_is_number(each) or each.shape.as_list() == [self.entries] for each in operands)

    def _can_sum(self, operation: tf.Operation) -> bool:
        rows, ids, _ = operation.inputs
        is_known = operation.outputs[0].shape.rank == rows.shape.rank == 2 and ids.shape.rank == 1
        return bool(is_known and not operation.control_inputs and self._has_only_readers_inside(operation))

    def check(self) -> None:
        """Builds the checks of indices, which run before the commit."""
        for operation in {each.inputs[1].name: each for each in self._sums.values()}.values():
            ids = operation.inputs[1]
            count = tf.constant(operation.outputs[0].shape[0], ids.dtype)
            problem = ["an index of rows to be added up is too large; indices and number of rows:", ids, count]
            tf.raw_ops.Assert(condition=tf.reduce_all(ids < count), data=problem)

    def make(self, previous: tf.Operation) -> dict[Hashable, tf.Operation]:
        """Builds the loop, after `previous`. Returns the assignment of each variable."""
        with tf.control_dependencies(None), tf.control_dependencies([previous]):
            values = [variable_ops.taken(each.handle, each.value.dtype, self.entries) for each in self.new]
            starts = [tf.constant(0, tf.int64), *values]
            width = next((each.outputs[0].shape[1] for each in self._sums.values()), 1)
            rows_per_block = max(1, _BLOCK // (width * _ALIGNED)) * _ALIGNED
            count = -(-self.entries // (rows_per_block * width))
            sums = self._sorted(rows_per_block, count)
            shapes = [each.shape for each in starts]
            body, condition = (LoopGraph(label, has_effects=False) for label in ("body", "condition"))
            with body.graph.as_default():
                body.carry(starts, shapes)
            with body.building():
                body.end(_Round(self, body.carried, rows_per_block, width, sums).made())
            with condition.graph.as_default():
                condition.carry(starts, shapes)
            condition.share_captures(body)
            with condition.building():
                condition.end([condition.carried[0] < count])
            loop = while_op(condition, body, starts, shapes, 1)
            for each in (*self._operations, *self._sums):
                self._after.forget(each)
            results = loop.outputs[1 : len(starts)]
            return {each.variable: variable_ops.assign(each.handle, to) for each, to in zip(self.new, results)}

    def _sorted(self, rows_per_block: int, count: int) -> dict[str, _Rows]:
        """Returns the rows of each sum by index, by the name of its operation."""
        orders: dict[str, tuple[tf.Tensor, tf.Tensor, tf.Tensor]] = {}
        result = {}
        for name, each in self._sums.items():
            rows, ids, _ = each.inputs
            if ids.name not in orders:
                order = tf.argsort(ids, stable=True)
                in_order = tf.gather(ids, order)
                begins = tf.range(count + 1, dtype=ids.dtype) * rows_per_block
                ends = tf.raw_ops.LowerBound(sorted_inputs=in_order[tf.newaxis], values=begins[tf.newaxis])[0]
                orders[ids.name] = order, in_order, ends
            order, in_order, ends = orders[ids.name]
            result[name] = _Rows(tf.gather(rows, order), in_order, ends)
        return result

    def place_of(self, tensor: tf.Tensor) -> int | None:
        """Returns which of the variables `tensor` was read from; None: from none of them."""
        if tensor.op.type != variable_ops.READ:
            return None
        return next((i for i, each in enumerate(self.new) if each.handle.name == tensor.op.inputs[0].name), None)

    @property
    def operations(self) -> Iterable[tf.Operation]:
        """The operations that compute the new values, in an order in which they can run."""
        return self._operations.values()


class _Round:
    """One round of the loop, in the graph of its body: a block of entries.

    Args:
        carried: the number of the round, and the values of the variables.
        rows_per_block: rows of `width` entries.
    """

    def __init__(
        self, blocks: Blocks, carried: Sequence[tf.Tensor], rows_per_block: int, width: int, sums: dict[str, _Rows]
    ) -> None:
        self._blocks, self._width, self._sums = blocks, width, sums
        self._number, *self._values = carried
        self._row = self._number * rows_per_block
        self._rows = tf.minimum(tf.constant(rows_per_block, tf.int64), blocks.entries // width - self._row)
        self._begin, self._count = self._row * width, self._rows * width
        self._slices: dict[str, tf.Tensor] = {}
        self._made: dict[str, tf.Tensor] = {}

    def made(self) -> list[tf.Tensor]:
        """Returns the inputs of the next round."""
        for operation in self._blocks.operations:
            self._made[operation.name] = self._build(operation)
        new = [self._made[each.value.op.name] for each in self._blocks.new]
        # Then nobody has slices of the old values, so TensorFlow writes in their memory.
        with tf.control_dependencies(new):
            updated = [
                variable_ops.replaced(value, self._begin, block, by_fours=True)
                for value, block in zip(self._values, new)
            ]
        return [self._number + 1, *updated]

    def _build(self, operation: tf.Operation) -> tf.Tensor:
        kind, operands = operation.type, list(operation.inputs)
        if kind == "Reshape":
            name = operands[0].op.name
            return self._sum(self._sums[name]) if name in self._sums else self._block(operands[0])
        if kind in _FILLS:
            number = operands[1] if kind == "Fill" else operands[0]
            return tf.fill([self._count], tf.reshape(number, []))
        graph = tf.compat.v1.get_default_graph()
        attrs = {name: each for name, each in operation.node_def.attr.items() if name not in _LOCAL_ATTRIBUTES}
        results = [each.dtype for each in operation.outputs]
        (made,) = create_op(graph, kind, list(map(self._block, operands)), results, attrs=attrs, name=kind).outputs
        return made

    def _block(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns the entries of a tensor that belong to this round."""
        if tensor.op.name in self._made:
            return self._made[tensor.op.name]
        if _is_number(tensor):
            return tensor
        if tensor.name not in self._slices:
            place = self._blocks.place_of(tensor)
            whole = self._values[place] if place is not None else tf.reshape(tensor, [-1])
            self._slices[tensor.name] = whole[self._begin : self._begin + self._count]
        return self._slices[tensor.name]

    def _sum(self, rows: _Rows) -> tf.Tensor:
        begin, end = rows.ends[self._number], rows.ends[self._number + 1]
        ids = rows.ids[begin:end] - tf.cast(self._row, rows.ids.dtype)
        return tf.reshape(tf.math.unsorted_segment_sum(rows.rows[begin:end], ids, self._rows), [-1])


def plan(after: AfterCommit, new: Iterable[New]) -> list[Blocks]:
    """Returns the variables to be updated in blocks, together if their updates share operations or read each other."""
    groups: list[tuple[list[New], set[str]]] = []
    for each in new:
        shape = each.value.shape
        if each.value not in after or shape.rank != 1 or shape.num_elements() < 2 * _BLOCK:
            continue
        operations = after.needed(each.value)
        operands = [tensor.op for one in operations.values() for tensor in one.inputs]
        read = [one.inputs[0].name for one in operands if one.type == variable_ops.READ]
        keys = {*operations, each.handle.name, *read}
        shared = [group for group in groups if group[1] & keys]
        groups = [group for group in groups if not group[1] & keys]
        groups.append(([*(one for some, _ in shared for one in some), each], keys.union(*(of for _, of in shared))))
    made = [Blocks(after, some, keys) for some, keys in groups]
    return [each for each in made if each.can_be_made()]


def _is_number(tensor: tf.Tensor) -> bool:
    return tensor.shape.rank in (0, 1) and tensor.shape.num_elements() == 1
