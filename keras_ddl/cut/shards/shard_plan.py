"""Plans which values of a step become flat shards: values that lead to a variable that is kept in flat shards.

These values are scattered or sliced as soon as something needs more than a part of a sum. The plan only affects bytes
and time, because a flat shard can always be gathered again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from keras_ddl.cut.analysis.program import BRANCHES, Node, Program, Value
from keras_ddl.cut.analysis.variable_ops import ASSIGNS, READ
from keras_ddl.cut.operations.factors import Kind, kind_of


class Plan:
    """The values of a program that become flat shards.

    Args:
        sharded: its handles of variables in flat shards.
    Attributes:
        towards: values that an entrywise computation leads to an assignment of a sharded variable, or of a weight that
            is updated from one. only: the subset of them that nothing else reads, as far as is known.
    """

    def __init__(self, program: Program, sharded: Collection[Value]) -> None:
        self._program = program
        self._sharded = set(sharded)
        self._inner = {node: _branches(node, self._sharded) for node in program.nodes if node.type in BRANCHES}
        variables = self._updated() | self._sharded
        self.towards = values_towards(program, lambda handle: handle in variables, self._inner)
        self.only: set[Value] = set()
        for node in reversed(program.nodes):
            for value in node.outputs:
                if value in self.towards and all(self._takes(each, value) for each in program.readers(value)):
                    self.only.add(value)

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
        return kind_of(reader) is Kind.ENTRYWISE and all(each in self.only for each in reader.outputs)


def _branches(node: Node, sharded: Collection[Value]) -> list[Plan]:
    graphs = [each for each in node.branch_graphs() if each is not None and len(each.inputs) == len(node.inputs) - 1]
    plans = []
    for program in map(Program, graphs):
        inside = [value for value, outer in zip(program.placeholders, node.inputs[1:]) if outer in sharded]
        plans.append(Plan(program, inside))
    return plans


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
