"""The traced step as a flat list of operations, with function calls inlined.

A function may be called twice, so an operation of its graph may occur several times in the step. `Node` and `Value` are
an operation and a tensor of one particular call.
"""

from __future__ import annotations

import builtins
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np

from keras_ddl.compat import tensorflow as tf_compat
from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.analysis import attributes

SHAPE_OPS = ("Shape", "ShapeN", "Size", "Rank")  # they read only the extents of a tensor
PYTHON_FUNCTIONS = ("EagerPyFunc", "PyFunc", "PyFuncStateless")  # may use variables that the graph does not show
BRANCHES = ("If", "StatelessIf", "Case", "StatelessCase")
LOOPS = ("While", "StatelessWhile")
_T = TypeVar("_T")


class Value:
    """A tensor of the step. Two values are equal only if they are the same object."""

    __slots__ = ("tensor", "node", "index", "_learned")

    def __init__(self, tensor: tf.Tensor, node: Node, index: int) -> None:
        self.tensor = tensor
        self.node = node
        self.index = index
        self._learned: tf.TensorShape | None = None

    @property
    def shape(self) -> tf.TensorShape:
        return self.tensor.shape if self._learned is None else self._learned

    def learn_shape(self, extents: Sequence[int | None]) -> None:
        """Sets a shape that tracing knew less precisely."""
        self._learned = tf.TensorShape(extents)

    @property
    def rank(self) -> int | None:
        rank: int | None = self.tensor.shape.rank
        return rank

    @property
    def dtype(self) -> tf.DType:
        return self.tensor.dtype

    @property
    def key(self) -> str:
        return f"{self.node.key}:{self.index}"

    def constant(self) -> np.ndarray | None:
        """Returns the value if tracing shows it."""
        result: np.ndarray | None = tf.get_static_value(self.tensor)
        if result is None and self.node.type == "Slice":  # a column of paddings, in the gradient of a Pad
            of, begin, size = (each.constant() for each in self.node.inputs)
            if of is None or begin is None or size is None:
                return None
            column: np.ndarray = of[tuple(slice(a, None if n == -1 else a + n) for a, n in zip(begin, size))]
            return column
        return result

    def source(self) -> Value:
        """Returns the value that a chain of Identity operations forwards; the value itself if there is no chain."""
        value = self
        while value.node.type == "Identity":
            value = value.node.inputs[0]
        return value

    def __repr__(self) -> str:
        return f"<{self.key} {self.dtype.name}{self.shape}>"


class Node:
    """An operation of the step.

    Attributes:
        inputs: the values that it reads, in order.
        outputs: the values that it makes.
        operation, traced: its operation, and the one that the program made. They differ if the step was cut before:
            `operation` is then a part of `traced`.
        after: nodes that must run before it because of control dependencies.
        is_pure: whether it only computes its outputs from its inputs.
        position: its index in an order in which all nodes can run.
        depth: the number of nodes that must run one after another before it.
        device: the device that the program asks for; "": any.
    """

    def __init__(
        self, operation: tf.Operation, inputs: list[Value], after: list[Node], prefix: str, device: str = ""
    ) -> None:
        self.operation = self.traced = operation
        self.type: str = operation.type
        self.device = attributes.device_within(device, operation.device)
        self.is_pure = not after and not tf_compat.is_stateful(operation)
        self.inputs = inputs
        self.after = after
        self.key: str = prefix + operation.name
        self.position = -1
        self.depth: int = 1 + max((each.depth for each in [*(value.node for value in inputs), *after]), default=0)
        self.outputs = [Value(tensor, self, index) for index, tensor in enumerate(operation.outputs)]

    @property
    def definition(self) -> attributes.NodeDef:
        # Constants are not cached, because their definitions may be large.
        return self.operation.node_def if self.type == "Const" else self._definition

    @functools.cached_property
    def _definition(self) -> attributes.NodeDef:
        return self.operation.node_def

    @functools.cached_property
    def reason_to_keep(self) -> str | None:
        """The reason why the operation is built unchanged and replicated; None if it may be cut."""
        return None if self.type == "Const" else attributes.reason_to_keep(self.operation, self.definition)

    @property
    def build_attributes(self) -> dict[str, attributes.AttrValue]:
        """The attributes with which a rank builds the operation; not cached for constants."""
        is_constant = self.type == "Const"
        return attributes.for_build(self.operation, self.definition) if is_constant else self._build_attributes

    @functools.cached_property
    def _build_attributes(self) -> dict[str, attributes.AttrValue]:
        return attributes.for_build(self.operation, self.definition)

    @functools.cached_property
    def attributes_key(self) -> bytes:
        """Type, device, attributes and known shapes: all that can differ for the same operands."""
        definition = attributes.NodeDef()
        definition.CopyFrom(self.definition)
        definition.ClearField("name")
        definition.ClearField("input")
        definition.ClearField("experimental_debug_info")
        definition.device = self.device
        shapes = str([each.shape for each in self.outputs]).encode()
        key: bytes = definition.SerializeToString(deterministic=True) + shapes
        return key

    def attr(self, name: str, kind: builtins.type[_T]) -> _T:
        """Returns an attribute whose type is known to be `kind`."""
        value: _T = self.operation.get_attr(name)
        assert isinstance(value, kind), f"{self}: {name} is {value!r}"
        return value

    def branch_graphs(self) -> list[tf.Graph | None]:
        """Returns the graphs of the branches of an If or Case; None for a graph that TensorFlow does not provide."""
        if self.type.endswith("Case"):
            return tf_compat.called_graphs(self.operation)
        return [tf_compat.called_graph(self.operation, f"{each}_branch") for each in ("then", "else")]

    def __repr__(self) -> str:
        return f"<{self.type} {self.key}>"


class Return(Node):
    """A placeholder for the reader of a function's output."""

    def __init__(self, outputs: list[Value]) -> None:
        self.type = "Return"  # not a type of TensorFlow's
        self.inputs, self.outputs, self.after, self.key = outputs, [], [], ""


class Program:
    """A traced function as nodes in an order in which they can run.

    Args:
        prefix: the beginning of every node's key.
        traced: the operations that the program made, by the names of the operations in `graph`, if the step was cut
            before; else None.
    Attributes:
        graph: the function's graph.
        nodes: the nodes that outputs and side effects need, and no others.
        inputs: one value for each argument.
        captured: pairs of a value and the outer tensor that it stands for.
        placeholders: one value for each input of the graph, captured or not.
        outputs: one value for each of the function's outputs.
        effects: nodes that must run although nothing reads them.
    """

    def __init__(self, graph: tf.Graph, prefix: str = "", traced: Mapping[str, tf.Operation] | None = None) -> None:
        self.graph = graph
        inner = _Inlining(prefix, list(graph.inputs), None, graph)
        self.placeholders = inner.arguments
        outers = {internal.name: external for external, internal in graph.captures}
        pairs = list(zip(graph.inputs, self.placeholders))
        self.captured = [(value, outers[tensor.name]) for tensor, value in pairs if tensor.name in outers]
        self.inputs = [value for tensor, value in pairs if tensor.name not in outers]
        self.outputs = [inner.value(each) for each in graph.outputs]
        self.effects = [node for each in inner.in_order(graph.control_outputs) for node in inner.nodes_of(each)]
        self._index()
        if traced is not None:
            for node in self.nodes:
                node.traced = traced.get(node.operation.name, node.operation)

    def keep_only(self, effects: Sequence[Node]) -> None:
        """Removes everything that these nodes do not need, outputs included."""
        self.outputs, self.effects = [], list(effects)
        self._index()

    def _index(self) -> None:
        self.nodes = list(self._needed())
        for position, node in enumerate(self.nodes):
            node.position = position
        self._readers: dict[Value, list[Node]] = {}
        for node in [*self.nodes, Return(self.outputs)]:
            for each in node.inputs:
                self._readers.setdefault(each, []).append(node)

    def readers(self, value: Value) -> list[Node]:
        """Returns the nodes that read a value, once for each read. The reader of the program's output is a `Return`."""
        return self._readers.get(value, [])

    def _needed(self) -> Iterator[Node]:
        """Yields the needed nodes, operands first."""
        seen = {value.node for value in self.placeholders}
        for start in [*self.effects, *(value.node for value in self.outputs)]:
            stack = [(start, iter(_before(start)))]
            if start in seen:
                continue
            seen.add(start)
            while stack:
                node, others = stack[-1]
                following = next((each for each in others if each not in seen), None)
                if following is None:
                    stack.pop()
                    yield node
                else:
                    seen.add(following)
                    stack.append((following, iter(_before(following))))


def _before(node: Node) -> list[Node]:
    return [*(value.node for value in node.inputs), *node.after]


class _Inlining:
    """Makes nodes of the operations of one function call, or of the step itself.

    Nodes are made on demand, starting from requested tensors, so unneeded operations are never visited.
    """

    def __init__(
        self,
        prefix: str,
        placeholders: Sequence[tf.Tensor],
        arguments: Sequence[Value] | None,
        graph: tf.Graph,
        device: str = "",
    ) -> None:
        self.prefix = prefix
        self.device = device
        self.graph = graph
        self._traced = {operation.name: place for place, operation in enumerate(graph.get_operations())}
        self._values: dict[str, Value] = {}
        self._nodes: dict[str, list[Node]] = {}
        self._calls: dict[str, _Inlining] = {}
        self._outer_after: list[Node] = []
        if arguments is None:
            arguments = [Node(tensor.op, [], [], prefix).outputs[0] for tensor in placeholders]
        self.arguments: list[Value] = list(arguments)
        for tensor, value in zip(placeholders, self.arguments):
            self._values[tensor.name] = value
            self._nodes[tensor.op.name] = []

    def in_order(self, operations: Sequence[tf.Operation]) -> list[tf.Operation]:
        """Returns operations in the order in which they were traced.

        TensorFlow keeps them in sets ordered by address, and every rank must walk its program in one order.
        """
        return sorted(operations, key=lambda each: self._traced[each.name]) if len(operations) > 1 else list(operations)

    def value(self, tensor: tf.Tensor) -> Value:
        result = self._values.get(tensor.name)
        if result is None:
            self._make(tensor.op)
            result = self._values[tensor.name]
        return result

    def nodes_of(self, operation: tf.Operation) -> list[Node]:
        """Returns the nodes that must have run when `operation` has."""
        if operation.name not in self._nodes:
            self._make(operation)
        return self._nodes[operation.name]

    def _make(self, wanted: tf.Operation) -> None:
        # Iterative, because recursion on a long step would overflow Python's stack.
        stack = [wanted]
        while stack:
            operation = stack[-1]
            if operation.name in self._nodes:
                stack.pop()
                continue
            before = [*(each.op for each in operation.inputs), *operation.control_inputs]
            missing = [each for each in before if each.name not in self._nodes]
            if missing:
                stack.extend(missing)
                continue
            stack.pop()
            inputs = [self._values[each.name] for each in operation.inputs]
            after = [node for each in self.in_order(operation.control_inputs) for node in self._nodes[each.name]]
            after += [] if operation.inputs else self._outer_after
            if operation.type in tf_compat.CALLS and self._inline(operation, inputs, after):
                continue
            if tf_compat.is_stateful(operation) and operation.inputs:
                after += self._outer_after
            node = Node(operation, inputs, after, self.prefix, self.device)
            self._nodes[operation.name] = [node]
            self._values.update((tensor.name, value) for tensor, value in zip(operation.outputs, node.outputs))

    def _inline(self, operation: tf.Operation, inputs: list[Value], after: list[Node]) -> bool:
        graph = tf_compat.called_graph(operation)
        if graph is None or len(graph.inputs) != len(inputs):
            return False
        if attributes.reason_to_keep(operation, operation.node_def) is not None:
            return False
        device = attributes.device_within(self.device, operation.device)
        inner = _Inlining(f"{self.prefix}{operation.name}/", list(graph.inputs), inputs, graph, device)
        inner._outer_after = [*self._outer_after, *after]
        self._calls[operation.name] = inner
        values = [inner.value(each) for each in graph.outputs]
        effects = [node for each in inner.in_order(graph.control_outputs) for node in inner.nodes_of(each)]
        self._nodes[operation.name] = [*effects, *(value.node for value in values)]
        self._values.update((tensor.name, value) for tensor, value in zip(operation.outputs, values))
        return True
