"""Plans which values of a step become flat shards: values that lead to a variable that is kept in flat shards.

These values are scattered or sliced as soon as something needs more than a part of a sum. The plan only affects bytes
and time, because a flat shard can always be gathered again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from keras_ddl.compat.tensorflow import tf, variable_shape
from keras_ddl.cut.analysis.program import BRANCHES, Node, Program, Return, Value
from keras_ddl.cut.analysis.row_counts import Numbers, learn_row_counts, numbers_inside
from keras_ddl.cut.analysis.variable_ops import ASSIGNS, READ, ROW_UPDATES
from keras_ddl.cut.operations.factors import Kind, kind_of

SCATTER_INTO = "TensorScatterUpdate"
_ANY_TABLE = tf.TensorSpec(None)  # the answer of a reader of rows that does not mind which table they belong to


class Plan:
    """The values of a program that become flat shards.

    Args:
        sharded: the program's handles of variables in flat shards.
        numbers: the entries of placeholders, as far as they are known.
    Attributes:
        towards: values from which entrywise operations alone compute what is assigned to a sharded variable, or to a
            weight that is updated from one.
        only: the subset of them that nothing else reads, as far as is known.
        reduced: values that are only reduced to numbers, after entrywise computations.
        rows: values that are only read as rows, or indices of rows, that are added to a table in shards, maybe after
            computations with numbers; with the table.
    """

    def __init__(self, program: Program, sharded: Collection[Value], numbers: Numbers) -> None:
        learn_row_counts(program, numbers)
        self._program = program
        self._sharded = set(sharded)
        branches = [each for each in program.nodes if each.type in BRANCHES]
        self._inner = {node: _branches(node, self._sharded, numbers) for node in branches}
        variables = self._updated() | self._sharded
        self.towards = values_towards(program, lambda handle: handle in variables, self._inner)
        self.only: set[Value] = set()
        self.reduced: set[Value] = set()
        self.rows: dict[Value, tf.TensorSpec] = {}
        computed = [value for node in reversed(program.nodes) for value in node.outputs]
        for value in [*computed, *program.placeholders]:
            readers = program.readers(value)
            if value in self.towards and all(self._takes(each, value) for each in readers):
                self.only.add(value)
            elif readers and is_static(value) and all(map(self._reduces, readers)):
                self.reduced.add(value)
            tables = [self._table_of(each, value) for each in readers]
            if tables and None not in tables:
                named = [each for each in tables if each is not None and each is not _ANY_TABLE]
                self.rows[value] = max(named, key=lambda each: each.dtype.size, default=_ANY_TABLE)

    def _updated(self) -> set[Value]:
        """Returns the handles of variables that are assigned values computed from sharded variables."""
        derived: set[Value] = set()
        result: set[Value] = set()
        for node in self._program.nodes:
            if node.type == READ and (node.inputs[0] in self._sharded or node.inputs[0] in result):
                derived.update(node.outputs)
            elif node.type in ASSIGNS and node.inputs[1] in derived:
                result.add(node.inputs[0])
            elif kind_of(node) is Kind.FORWARD:
                derived.update(output for each, output in zip(node.inputs, node.outputs) if each in derived)
            elif any(each in derived and is_operand(each, node) for each in node.inputs):
                derived.update(node.outputs)
        return result

    def _reduces(self, reader: Node) -> bool:
        kind = Kind.OTHER if isinstance(reader, Return) else kind_of(reader)
        if kind is Kind.REDUCTION:
            return reduces_all(reader)
        is_row_by_row = kind is Kind.ENTRYWISE or reader.type == SCATTER_INTO
        return is_row_by_row and all(each in self.reduced for each in reader.outputs)

    def _table_of(self, reader: Node, value: Value) -> tf.TensorSpec | None:
        """Returns the table to whose rows a reader adds `value`; _ANY_TABLE: it needs no table; None: it needs `value`
        itself, so `value` must be built.
        """
        if isinstance(reader, Return):
            return None
        if reader.type == "UnsortedSegmentSum" and value is not reader.inputs[2]:
            (table,) = reader.outputs
            return tf.TensorSpec(table.shape, table.dtype) if table in self.only or table in self.reduced else None
        if reader.type == SCATTER_INTO and value is not reader.inputs[0]:
            (table,) = reader.outputs
            return tf.TensorSpec(table.shape, table.dtype) if table in self.reduced else None
        if reader.type in ROW_UPDATES and reader.inputs[0] in self._sharded and value is not reader.inputs[0]:
            return tf.TensorSpec(variable_shape(reader.inputs[0].tensor), reader.inputs[2].dtype)
        if adds_up_rows(reader) and value is reader.inputs[0]:
            return _ANY_TABLE
        if reader in self._inner:
            tables = {
                plan.rows.get(inner)
                for plan in self._inner[reader]
                for inner, outer in zip(plan._program.placeholders, reader.inputs[1:])
                if outer is value and plan._program.readers(inner)
            }
            return tables.pop() if len(tables) == 1 else None
        if (kind_of(reader) is Kind.FORWARD or keeps_rows(reader)) and not reader.after:
            tables = {self.rows.get(output) for each, output in zip(reader.inputs, reader.outputs) if each is value}
            return tables.pop() if len(tables) == 1 else None
        if joins_rows(reader) or computes_rows(reader) or expands_indices(reader):
            return self.rows.get(reader.outputs[0])
        return None

    def _takes(self, reader: Node, value: Value) -> bool:
        """Whether a shard of `value` is enough for a reader."""
        if kind_of(reader) is Kind.REDUCTION:
            return reduces_all(reader)
        if reader.type in ASSIGNS:
            return True
        if reader in self._inner:
            pairs = [
                (plan, inner)
                for plan in self._inner[reader]
                for inner, outer in zip(plan._program.placeholders, reader.inputs[1:])
                if outer is value
            ]
            return all(inner in plan.towards or not plan._program.readers(inner) for plan, inner in pairs)
        if kind_of(reader) is Kind.FORWARD:
            passed_on = [output for each, output in zip(reader.inputs, reader.outputs) if each is value]
            return all(each in self.only or not self._program.readers(each) for each in passed_on)
        are_enough = all(each in self.only or each in self.reduced for each in reader.outputs)
        return kind_of(reader) is Kind.ENTRYWISE and are_enough


def _branches(node: Node, sharded: Collection[Value], numbers: Numbers) -> list[Plan]:
    graphs = [each for each in node.branch_graphs() if each is not None and len(each.inputs) == len(node.inputs) - 1]
    plans = []
    for program in map(Program, graphs):
        inside = [value for value, outer in zip(program.placeholders, node.inputs[1:]) if outer in sharded]
        plans.append(Plan(program, inside, numbers_inside(program, node, numbers)))
    return plans


def joins_rows(node: Node) -> bool:
    """Whether an operation puts rows, or indices of rows, one after another."""
    if node.type != "ConcatV2" or not node.is_pure:
        return False
    axis, rank = node.inputs[-1].constant(), node.outputs[0].rank
    return axis is not None and rank in (1, 2) and int(axis) in (0, -rank)


def computes_rows(node: Node) -> bool:
    """Whether an operation computes rows from rows, entry by entry, with numbers alone."""
    if kind_of(node) is not Kind.ENTRYWISE or not node.is_pure or len(node.outputs) != 1:
        return False
    rows = {each for each in node.inputs if not _is_number(each)}
    return len(rows) == 1 and rows.pop().rank == 2 == node.outputs[0].rank


def keeps_rows(node: Node) -> bool:
    """Whether an operation gives rows the shape that they have, as the gradient of a look-up does."""
    if node.type != "Reshape":
        return False
    shapes = [each.shape for each in (node.inputs[0], *node.outputs)]
    return all(each.rank == 2 and each[1] is not None for each in shapes) and shapes[0][1] == shapes[1][1]


def expands_indices(node: Node) -> bool:
    """Whether an operation gives indices of rows a second axis, as TensorFlow's scatters expect it."""
    return node.type == "ExpandDims" and node.inputs[0].rank == 1 and node.outputs[0].shape[-1:] == [1]


def adds_up_rows(node: Node) -> bool:
    """Whether an operation adds up all entries of rows, or their squares."""
    return node.type in ("Sum", "L2Loss") and node.is_pure and _is_number(node.outputs[0])


def _is_number(value: Value) -> bool:
    return value.rank is not None and value.shape.num_elements() == 1


def values_towards(
    program: Program, is_variable: Callable[[Value], bool], inner: Mapping[Node, Sequence[Plan]] | None = None
) -> set[Value]:
    """Returns the values that an entrywise computation leads to an assignment of certain variables.

    is_variable: whether a handle belongs to such a variable. inner: the plans of branches.
    """
    result: set[Value] = set()
    for node in reversed(program.nodes):
        if node.type in ASSIGNS:
            if is_static(node.inputs[1]) and is_variable(node.inputs[0]):
                result.add(node.inputs[1])
        elif inner and node in inner:
            for plan in inner[node]:
                arguments = zip(plan._program.placeholders, node.inputs[1:])
                result.update(outer for value, outer in arguments if value in plan.towards)
        elif kind_of(node) is Kind.FORWARD:
            result.update(each for each, output in zip(node.inputs, node.outputs) if output in result)
        elif any(each in result for each in node.outputs):
            result.update(each for each in node.inputs if is_operand(each, node))
    return result


def is_static(value: Value) -> bool:
    """Whether the number of a value's entries, more than one, is known when the step is traced."""
    return bool(value.rank is not None and value.shape.is_fully_defined() and value.shape.num_elements() > 1)


def is_operand(value: Value, node: Node) -> bool:
    """Whether an entrywise operation computes each entry of its result from one entry of `value`."""
    if kind_of(node) is not Kind.ENTRYWISE or not is_static(value):
        return False
    return all(each.rank is not None and value.shape.as_list() == each.shape.as_list() for each in node.outputs)


def reduces_all(node: Node) -> bool:
    """Whether a reduction reduces many entries to one number."""
    output = node.outputs[0].shape
    return bool(is_static(node.inputs[0]) and output.is_fully_defined() and output.num_elements() == 1)
