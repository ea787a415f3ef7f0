"""The context in which rules build operations: placements of operands, their redistribution, and the rank's graph."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from keras_ddl.compat import tensorflow as tf_compat
from keras_ddl.compat.tensorflow import create_op, tf
from keras_ddl.cut.analysis import attributes
from keras_ddl.cut.analysis.attributes import AttrValue
from keras_ddl.cut.analysis.contents import AbstractValue
from keras_ddl.cut.analysis.dims import Dim, certain, if_certain
from keras_ddl.cut.analysis.extents import merged
from keras_ddl.cut.analysis.placements import REPLICATED, PlacedTensor, Sharded
from keras_ddl.cut.analysis.program import Node, Program, Value
from keras_ddl.cut.analysis.variable_ops import MARKED
from keras_ddl.cut.commit.writes import Writes
from keras_ddl.cut.operations import sums_in_order
from keras_ddl.cut.operations.seeds import agreed_seeds
from keras_ddl.cut.values.local_shapes import no_dependencies
from keras_ddl.cut.values.placed_values import PlacedValues

_LARGE = 1024  # constants with at least this many bytes are not compared with others


class Segments(NamedTuple):
    """A batch of entries that belong to rows. `ids`: of their rows, on every rank. rows: how the rows are sharded."""

    ids: tf.Tensor
    rows: Sharded


class _Made(NamedTuple):
    """An operation of this rank's graph. `inputs`: tensors whose ids are part of its key, kept alive."""

    operation: tf.Operation
    inputs: Sequence[tf.Tensor]


@dataclass(kw_only=True, eq=False)
class Context(PlacedValues):
    """Builds operations of one program in one rank's graph.

    Args: those of `PlacedValues`, and
        seed: equal on all ranks; random operations without a seed get one made from it.
        gathered_bytes: bytes of weights in flat shards that may be gathered at a time (gathered_weights.py).
    Attributes:
        writes: the writes of a step that commits; None: variables are written at once.
        in_loop: whether this is the body or condition of a loop, in which no collective may run.
        is_trial: whether it is built only to learn the placements of its outputs.
        waits_outside: whether a collective of the enclosing graph is still to come.
        before: the operations after which the node being built runs.
        built_from: operations of the program, by the names of the operations built from them.
        programs, decisions: shared with the graphs inside this one, which are built several times.
        segments, assumed: batches of entries that belong to rows, by number (segments.py).
    """

    seed: int = 0
    gathered_bytes: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.writes: Writes | None = None
        self.in_loop = False
        self.is_trial = False
        self.waits_outside = False
        self.before: list[tf.Operation] = []
        self.programs: dict[str, Program] = {}  # by scope
        self.decisions: dict[Hashable, object] = {}  # latest decisions about branches and loops
        self.segments: dict[int, Segments] = {}
        self.assumed: list[tf.Tensor] = []  # conditions that the next batch of segments checks
        self._constants: dict[Hashable, tf.Tensor] = {}
        self._made: dict[Hashable, _Made] = {}  # by a key that equal operations share
        self.built_from: dict[str, tf.Operation] = {}
        self._linear: set[Node] = set()
        self._read_before: dict[tuple[Node, Value], Value] = {}
        self._operations_of_current: list[tf.Operation] = []  # operations of the node being built

    # ---- variables

    def read_before_loop(self, handle: Value, node: Node) -> tf.Tensor:
        """Returns the gathered value of a variable in shards or flat shards before the node being built. COLLECTIVE.

        That node is the loop around `node`, which reads the variable; inside the loop there are no collectives.

        Raises: ConfigError: the loop does more than read the variable. Pending.
        """
        assert self.node is not None
        key = self.node, handle
        if key not in self._read_before:
            dtype = node.attr("dtype", tf.DType)
            tensor = tf.raw_ops.ReadVariableOp(resource=self.local(handle), dtype=dtype)
            shape = certain(tf_compat.variable_shape(handle.tensor))
            value = self.new_value(node, tf.TensorSpec(shape, dtype), tensor, self.placement(handle))
            self.extents.set_dims(value, tuple(map(Dim, shape.as_list())))
            self._read_before[key] = value
        return self.replicated(self._read_before[key])

    # ---- graphs inside of operations

    def scope_of(self, node: Node, label: str) -> str:
        """Returns the prefix of names in one of the graphs of an operation."""
        return f"{self.scope}{node.position}/{label}/"  # by position, because names may differ between ranks

    def program_of(self, node: Node, graph: tf.Graph, label: str) -> Program:
        """Returns one of the graphs of an operation as a program."""
        scope = self.scope_of(node, label)
        if scope not in self.programs:
            self.programs[scope] = Program(graph, scope)
        return self.programs[scope]

    def knowledge_of(self, values: Sequence[Value]) -> Hashable:
        """Returns a key that covers all facts that decisions about a graph with these arguments depend on."""
        return self.in_loop, tuple(map(self._knowledge, values))

    def _knowledge(self, value: Value) -> Hashable:
        numbers = if_certain(self.extents.numbers, value) if value.dtype.is_integer else None
        return self.abstract(value), numbers, self.has_replicated(value), self.depends_on_batch(value)

    def abstract(self, value: Value) -> AbstractValue:
        """Returns the facts about a value, apart from its entries."""
        content = if_certain(self.extents.content, value) if value.dtype == tf.variant else None
        return AbstractValue(self.placement(value), if_certain(self.dims, value), content)

    def set_abstract(self, output: Value, known: AbstractValue) -> None:
        """Sets facts about an output of a branch or a loop that go beyond what tracing knows."""
        self.extents.named[output.key] = output
        self.extents.set_dims(output, merged(output, known.dims))
        self.extents.set_content(output, known.content)

    # ---- operations

    def is_only_reshaped(self, value: Value) -> bool:
        """Whether only Reshape operations read `value`, so that axes of extent 1 do not matter."""
        return all(each.type == "Reshape" for each in self.program.readers(value))

    def make(self, node: Node, inputs: Sequence[tf.Tensor], **attrs: AttrValue) -> list[tf.Tensor]:
        """Builds the operation of `node` with these inputs, after the operations it depends on; returns its outputs.

        attrs: attributes that replace the node's.
        """

        def create() -> list[tf.Tensor]:
            return self.create(node, inputs, attrs)

        return create() if self.writes is None else self.writes.make(node, inputs, create)

    def create(self, node: Node, inputs: Sequence[tf.Tensor], attrs: Mapping[str, AttrValue]) -> list[tf.Tensor]:
        """Builds the operation as `make` does, even if it writes a variable."""
        key = self._key_of_equals(node, inputs) if not attrs else None
        if key in self._made:
            made = self._made[key].operation
            self._operations_of_current.append(made)
            return list(made.outputs)
        operation = node.operation
        known = {**node.build_attributes, **agreed_seeds(node, self.seed), **attrs}
        if sums_in_order.is_addition(node):
            known.update(MARKED)
        device = attributes.device_of_made(node.device)
        graph = tf.compat.v1.get_default_graph()
        name = operation.name.rsplit("/", 1)[-1].lstrip("_->\\") or operation.type
        if self.everyone is None:  # the result will be cut again, which needs the functions' graphs
            tf_compat.lend_functions(operation, graph)
        with tf.device(device) if device is not None else contextlib.nullcontext():
            if sums_in_order.is_long_sum(node):
                operations = sums_in_order.added(list(inputs), name)
            else:
                results = [each.dtype for each in operation.outputs]
                operations = [create_op(graph, operation.type, list(inputs), results, attrs=known, name=name)]
        made = operations[-1]
        if self.everyone is None:
            self.built_from.update((each.name, node.traced) for each in operations)
        # Includes operations of materializers: the node being built then waits for them.
        self._operations_of_current.append(made)
        if key is not None:
            self._made[key] = _Made(made, inputs)
        return list(made.outputs)

    def _key_of_equals(self, node: Node, inputs: Sequence[tf.Tensor]) -> Hashable:
        """Returns a key that two operations share only if their results are equal; None: not known.

        An optimizer repeats for each weight computations that are the same for all weights: a quarter of a step's
        operations.
        """
        if self.before or not inputs or not node.is_pure:
            return None
        return tf.compat.v1.get_default_graph(), *map(id, inputs), node.attributes_key

    def make_replicated(self, node: Node) -> list[PlacedTensor]:
        """Builds the operation from replicated inputs, the same on every rank. Raises: Pending."""
        if node.type == "Const" and not node.after:
            return [PlacedTensor(self._constant(node), REPLICATED)]
        outputs = self.make(node, self.all_replicated(node.inputs))
        for tensor, value in zip(outputs, node.outputs):
            if value.rank is not None and tensor.dtype not in (tf.resource, tf.variant):
                tensor.set_shape(value.shape)
        return [PlacedTensor(tensor, REPLICATED) for tensor in outputs]

    def mark_linear(self, node: Node) -> None:
        """Marks a node as built from parts of a sum, so its results are parts of the node's result."""
        self._linear.add(node)

    def _replicate(self, value: Value) -> tf.Tensor:
        """Replicates a value.

        If the sums that it depends on have been made since, it is computed again from them, not summed separately.
        """
        nodes = self._nodes_after_sums(value)
        if not nodes:
            return super()._replicate(value)
        made: dict[Value, PlacedTensor] = {}
        with no_dependencies():
            for node in nodes:
                made.update(zip(node.outputs, self.make_replicated(node)))
                self._placed.update((each, made[each]) for each in node.outputs)
        self.place_again(made)
        return made[value].tensor

    def _shard_flat(self, value: Value) -> tf.Tensor:
        if self._nodes_after_sums(value):
            self.replicated(value)
        return super()._shard_flat(value)

    def _nodes_after_sums(self, value: Value) -> list[Node]:
        """Returns the nodes, in a runnable order, that compute a value from sums that were made; [] if none do."""
        # Iterative, because recursion over a sum of many terms would overflow Python's stack.
        values, nodes = [value], dict[Node, None]()
        for each in values:
            node = each.node
            if self.placement(each) == REPLICATED or node in nodes:
                continue
            if node not in self._linear or each.index < 0 or not node.is_pure:
                return []
            nodes[node] = None
            values += node.inputs
        return sorted(nodes, key=lambda node: node.position)

    def _constant(self, node: Node) -> tf.Tensor:
        """Builds a constant. Small constants, which a program repeats at every use, are built once."""
        content = node.operation.node_def.attr["value"].tensor
        if content.ByteSize() > _LARGE:
            return self.make(node, [])[0]
        key = tf.compat.v1.get_default_graph(), content.SerializeToString(deterministic=True)
        if key not in self._constants:
            with no_dependencies():
                self._constants[key] = self.make(node, [])[0]
        return self._constants[key]

    def assign(self, kind: str, handle: tf.Tensor, value: tf.Tensor) -> tf.Operation | None:
        """Writes a variable, now or (None) when the step commits. `kind`: one of variable_ops.ASSIGNS."""
        if self.writes is not None and not self.writes.is_early(handle):
            self.writes.assign(kind, handle, value)
            return None
        made = getattr(tf.raw_ops, kind)(resource=handle, value=value)
        self.ran(made)
        return made

    def operations_so_far(self) -> list[tf.Operation]:
        """Returns the operations built so far for the node being built."""
        return list(self._operations_of_current)

    def ran(self, operation: tf.Operation) -> None:
        """Counts an operation as part of the node being built; operations that run after the node wait for it."""
        self._operations_of_current.append(operation)
