"""Which values of a step are on their way to a variable that is held in shards.

These are taken by reduce-scatter, or sliced, as soon as something needs more of them than a part of a sum. Nothing
depends on it but bytes and time: a shard can always be put together again.
"""

from __future__ import annotations

from collections.abc import Collection

from keras_ddl.compat import tensorflow as tf_compat
from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.program import Node, Program, Value
from keras_ddl.cut.rows import entrywise
from keras_ddl.cut.variable_ops import ASSIGNS, READ

PASSED_ON = ("Identity", "StopGradient", "PreventGradient", "Snapshot")
ENTRYWISE = entrywise.ENTRYWISE.union(PASSED_ON)
BRANCHES = ("If", "StatelessIf", "Case", "StatelessCase")
REDUCTIONS = ("Sum", "Mean", "Max", "Min", "Prod", "All", "Any", "L2Loss")


class Plan:
    """What of a program is towards shards.

    Args:
        sharded: the values of its handles of variables that are held in shards.
    Attributes:
        towards: values that an entrywise computation leads to an assignment of a sharded variable, or of a weight that
            is updated from one. only: those of them that nothing else reads, as far as is known.
    """

    def __init__(self, program: Program, sharded: Collection[Value]) -> None:
        self._program = program
        self._sharded = set(sharded)
        self._inner: dict[Node, list[tuple[Program, Plan]]] = {}
        for node in program.nodes:
            if node.type in BRANCHES:
                self._inner[node] = _branches(node, self._sharded)
        weights = self._updated()
        self.towards: set[Value] = set()
        self.only: set[Value] = set()
        for node in reversed(program.nodes):
            if node.type in ASSIGNS and node.inputs[0] in weights | self._sharded and is_static(node.inputs[1]):
                self.towards.add(node.inputs[1])
            elif node in self._inner:
                for _, plan in self._inner[node]:
                    arguments = zip(plan._program.placeholders, node.inputs[1:])
                    self.towards.update(outer for value, outer in arguments if value in plan.towards)
            elif node.type == "IdentityN":  # of a function with a gradient of its own, as tf.clip_by_norm
                self.towards.update(each for each, output in zip(node.inputs, node.outputs) if output in self.towards)
            elif any(each in self.towards for each in node.outputs):
                self.towards.update(each for each in node.inputs if is_operand(each, node))
        for node in reversed(program.nodes):
            for value in node.outputs:
                if value in self.towards and all(self._takes(each, value) for each in program.readers(value)):
                    self.only.add(value)

    def _updated(self) -> set[Value]:
        """Returns the handles of variables that are assigned what is computed of sharded ones."""
        derived: set[Value] = set()
        found: set[Value] = set()
        for node in self._program.nodes:
            if node.type == READ and (node.inputs[0] in self._sharded or node.inputs[0] in found):
                derived.update(node.outputs)
            elif node.type in ASSIGNS and node.inputs[1] in derived:
                found.add(node.inputs[0])
            elif node.type == "IdentityN":
                derived.update(output for each, output in zip(node.inputs, node.outputs) if each in derived)
            elif node.type in ENTRYWISE and any(each in derived and is_operand(each, node) for each in node.inputs):
                derived.update(node.outputs)
        return found

    def _takes(self, reader: Node | None, value: Value) -> bool:
        """Whether a reader makes do with a shard of `value`."""
        if reader is None:
            return False
        if reader.type in REDUCTIONS:
            return reduces_all(reader)
        if reader.type in ASSIGNS:
            return True
        if reader in self._inner:
            places = [i for i, each in enumerate(reader.inputs[1:]) if each is value]
            return all(
                plan._program.placeholders[i] in plan.towards
                or not plan._program.readers(plan._program.placeholders[i])
                for _, plan in self._inner[reader]
                for i in places
            )
        if reader.type == "IdentityN":
            passed_on = [output for each, output in zip(reader.inputs, reader.outputs) if each is value]
            return all(each in self.only or not self._program.readers(each) for each in passed_on)
        return reader.type in ENTRYWISE and all(each in self.only for each in reader.outputs)


def _branches(node: Node, sharded: set[Value]) -> list[tuple[Program, Plan]]:
    if node.type.endswith("Case"):
        graphs = tf_compat.called_graphs(node.operation)
    else:
        graphs = [tf_compat.called_graph(node.operation, f"{each}_branch") for each in ("then", "else")]
    found = []
    for graph in graphs:
        if graph is None or len(graph.inputs) != len(node.inputs) - 1:
            continue
        program = Program(graph)
        inside = [value for value, outer in zip(program.placeholders, node.inputs[1:]) if outer in sharded]
        found.append((program, Plan(program, inside)))
    return found


def is_static(value: Value) -> bool:
    """Whether the number of a value's entries, more than one, is known when the step is traced."""
    return value.rank is not None and value.shape.is_fully_defined() and value.shape.num_elements() > 1


def is_operand(value: Value, node: Node) -> bool:
    """Whether an entrywise operation takes the entries of `value` one by one, for those of its result."""
    same = all(value.shape.as_list() == each.shape.as_list() for each in node.outputs if each.rank is not None)
    return node.type in ENTRYWISE and is_static(value) and same and all(each.rank is not None for each in node.outputs)


def reduces_all(node: Node) -> bool:
    """Whether a reduction leaves one number of many."""
    output = node.outputs[0].shape
    return is_static(node.inputs[0]) and output.is_fully_defined() and output.num_elements() == 1


def is_numeric(value: Value) -> bool:
    """Whether ranks can combine values of this dtype."""
    return value.dtype not in (tf.string, tf.variant, tf.resource)
