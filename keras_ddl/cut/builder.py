"""Makes one rank's graph out of the step of one process. See docs/cut.md for the contract.

The nodes of the program are made again, one after the other, in the graph that is being traced. Of each value the
builder knows how this rank holds it (states.py); a rule (rules/) may make an operation from inputs as they are held.
Where there is no rule, or the rule declines, the operation is made from whole inputs, on every rank alike: that is
right for every operation, and rules only make it fast.

Sums over ranks are put off until nothing else can be made: what one backward pass needs summed is then known together,
and goes in buckets.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Protocol

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut import attributes, first_rank, opaque
from keras_ddl.cut.collectives import COMBINED_DTYPES, Collectives
from keras_ddl.cut.extents import Dims
from keras_ddl.cut.held import Held, no_dependencies
from keras_ddl.cut.pieces import Batch, Piece, Waiting
from keras_ddl.cut.program import Node, Program, Value
from keras_ddl.cut.registry import rule_of
from keras_ddl.cut.report import Report
from keras_ddl.cut.schedule import Schedule
from keras_ddl.cut.seeds import agreed_seeds
from keras_ddl.cut.states import WHOLE, Partial, Rows, State, Whole
from keras_ddl.cut.two_states import TwoStates
from keras_ddl.cut.writes import Writes

# Without the wrapper that looks for a deprecated argument at every call: a quarter of the time of a cut.
_create_op = getattr(tf.Graph.create_op, "__wrapped__", tf.Graph.create_op)
_OF_SHAPES = ("Shape", "ShapeN", "Size", "Rank")
_LARGE = 1024  # bytes of a constant that is not compared with others


class Apart(Protocol):
    """What makes some operations in a way that their types do not tell: rules/own_statistics.py."""

    def make(self, b: Builder, node: Node) -> list[Any] | None:
        """Returns a (tensor, state) for each output; None for all other operations. Raises: Waiting."""

    def before(self, node: Node) -> Node | None:
        """Returns a node that must be made before `node`, besides its inputs."""


class Builder(Held):
    """Makes one rank's graph. Every rank takes the same decisions: none depends on how many rows a rank has.

    Args:
        program: the step of one process.
        batch: the rows, see `Batch`.
        collectives: what sums and gathers.
        report: is told of every collective.
        seed: equal on all ranks; random operations that the program gave no seed get one made from it.
        scope: begins the names of collectives; the same on all ranks.
    """

    def __init__(
        self,
        program: Program,
        batch: Batch,
        collectives: Collectives,
        report: Report,
        seed: int = 0,
        scope: str = "",
    ) -> None:
        super().__init__(program, batch, collectives, report, scope)
        self.seed = seed
        self.apart: Apart | None = None
        self.writes: Writes | None = None  # of a step that commits; None: what is assigned is written
        self.in_loop = False  # where nothing can move between ranks
        self.is_tried = False  # made only to see in which states its values are
        self.waits_outside = False
        # Shared with the graphs inside, which are made several times: by scope, and what was decided the last time.
        self.programs: dict[str, Program] = {}
        self.decisions: dict[Hashable, Any] = {}
        self.before: list[tf.Operation] = []  # what the node that is made runs after
        self._two_states = TwoStates(self)
        self._done: dict[Node, list[tf.Operation]] = {}
        self._constants: dict[Any, tf.Tensor] = {}
        self._last: list[tf.Operation] = []

    def scope_of(self, node: Node, label: str) -> str:
        """Returns what the names begin with in one of the graphs of an operation."""
        return f"{self.scope}{node.position}/{label}/"  # by place: names may differ between ranks

    def program_of(self, node: Node, graph: Any, label: str) -> Program:
        """Returns one of the graphs of an operation as a program."""
        scope = self.scope_of(node, label)
        if scope not in self.programs:
            self.programs[scope] = Program(graph, scope)
        return self.programs[scope]

    def knowledge_of(self, values: Sequence[Value]) -> Hashable:
        """Returns what decisions on a graph that is given these values depend on."""
        return self.in_loop, tuple(map(self._knowledge, values))

    def _knowledge(self, value: Value) -> Hashable:
        numbers = self.extents.numbers(value) if value.dtype.is_integer else None
        content = self.extents.content(value) if value.dtype == tf.variant else None
        entries = numbers.entries if numbers is not None else None
        is_at_hand = self.has_whole(value), self.is_of_batch(value)
        return self.state(value), self.dims(value), entries, content, is_at_hand

    def is_only_reshaped(self, value: Value) -> bool:
        """Whether nothing reads `value` but Reshape: then axes of extent 1 do not matter."""
        return all(each is not None and each.type == "Reshape" for each in self.program.readers(value))

    def make(self, node: Node, inputs: Sequence[tf.Tensor], **attrs: Any) -> list[tf.Tensor]:
        """Makes the operation of `node` with these inputs, after the operations it depends on; returns its outputs.

        attrs: attributes in place of the node's.
        """
        found = self.writes.make(node, inputs, attrs) if self.writes is not None else None
        return self.create(node, inputs, attrs) if found is None else found

    def create(self, node: Node, inputs: Sequence[tf.Tensor], attrs: Mapping[str, Any]) -> list[tf.Tensor]:
        """`make`, at once, whatever it is."""
        operation = node.operation
        known = {**attributes.of_made(node.definition), **agreed_seeds(node, self.seed), **attrs}
        device = attributes.device_of_made(node.device)
        with tf.device(device) if device is not None else contextlib.nullcontext():
            made = _create_op(
                tf.compat.v1.get_default_graph(),
                operation.type,
                list(inputs),
                [each.dtype for each in operation.outputs],
                attrs=known,
                name=operation.name.rsplit("/", 1)[-1].lstrip("_->\\") or operation.type,
            )
        self._last.append(made)  # also from recipes, which run while another node is made: it then waits for them
        return list(made.outputs)

    def assign(self, kind: str, handle: Any, value: tf.Tensor) -> tf.Operation | None:
        """Writes a variable, now or (None) when the step commits. `kind`: one of writes.ASSIGNS."""
        if self.writes is not None and not self.writes.is_early(handle):
            self.writes.assign(kind, handle, value)
            return None
        made = getattr(tf.raw_ops, kind)(resource=handle, value=value)
        self.ran(made)
        return made

    def make_whole(self, node: Node) -> list[Piece]:
        """Makes the operation from whole inputs, alike on every rank."""
        if node.type == "Const" and not node.after:
            return [Piece(self._constant(node), WHOLE)]
        outputs = self.make(node, self.wholes(node.inputs))
        for tensor, value in zip(outputs, node.outputs):
            if value.rank is not None and tensor.dtype not in (tf.resource, tf.variant):
                tensor.set_shape(value.shape)
        return [Piece(tensor, WHOLE) for tensor in outputs]

    def _constant(self, node: Node) -> tf.Tensor:
        """Makes a constant; small ones, which a program repeats at every use, once each."""
        found = node.operation.node_def.attr["value"].tensor
        if found.ByteSize() > _LARGE:
            return self.make(node, [])[0]
        key = tf.compat.v1.get_default_graph(), found.SerializeToString(deterministic=True)
        if key not in self._constants:
            with no_dependencies():
                self._constants[key] = self.make(node, [])[0]
        return self._constants[key]

    def give(self, value: Value, tensor: Any, state: State, dims: Dims | None = None) -> None:
        super().give(value, tensor, state, dims)
        self._done[value.node] = []

    def build(self, wanted: Mapping[Value, State] | None = None) -> None:
        """Makes all nodes, and every wanted value in the state asked for (default: all outputs, whole)."""
        nodes = [node for node in self.program.nodes if node not in self._done]
        if wanted is None:
            wanted = dict.fromkeys(self.program.outputs, WHOLE)
        schedule = Schedule(nodes, self.apart.before if self.apart is not None else lambda node: None)
        ends = dict(wanted)
        for rounds in itertools.count():
            for node in schedule:
                if self._try(node):
                    schedule.done(node)
                else:
                    schedule.postpone(node)
            self._end_pass()
            for value, state in list(ends.items()):
                if value in self._pieces and self._attempt(lambda: self._in_state(value, state)):  # noqa: B023
                    del ends[value]
            if not schedule.is_waiting and not ends and self.sharding.finish():
                return
            self._ask_ahead(ends)
            if self.waits_outside and not self.sums and not self.exchange:
                raise Waiting
            summed = self.sums.make(rounds) if self.sums or not self.exchange else {}
            self.take_sums(summed)
            self.take_shards(*self.exchange.make(without=summed, rounds=rounds))
            schedule.retry()

    def _end_pass(self) -> None:
        """Called when all was made that could be."""

    def _ask_ahead(self, ends: Mapping[Value, State]) -> None:
        """Asks for results that wait for side effects, as those of every tf.function do: they travel with others."""
        for value, state in ends.items():
            while value not in self._pieces and value.node.type == "Identity":
                value = value.node.inputs[0]
            if value in self._pieces and isinstance(self.state(value), Partial) and isinstance(state, Whole):
                self._attempt(lambda: self.whole(value))  # noqa: B023

    def made_now(self) -> list[tf.Operation]:
        """Returns the operations of the node that is being made, as far as they are there."""
        return list(self._last)

    def ran(self, operation: tf.Operation) -> None:
        """Says that `operation` is one that the node being made consists of: what runs after the node waits for it."""
        self._last.append(operation)

    def _try(self, node: Node) -> bool:
        self._node, self._last = node, []
        self.before = before = [each for one in node.after for each in self._done[one]]
        if self.writes is not None:
            before += self.writes.before(node)
        try:
            with tf.control_dependencies(before):
                pieces = self._apply(node)
        except Waiting:
            return False
        finally:
            self._node = None
        for value, piece in zip(node.outputs, pieces):
            self._keep(value, piece if isinstance(piece, Piece) else Piece(*piece))
            self.extents.follow(value)
        self._done[node] = self._last or before
        return True

    def _keep(self, value: Value, piece: Piece) -> None:
        self._pieces[value] = piece
        if value.node.type not in _OF_SHAPES and any(map(self.is_of_batch, value.node.inputs)):
            self._of_batch.add(value)
        if isinstance(piece.state, Rows):
            dims = self.dims(value)
            if dims is None:
                raise AssertionError(f"{value}: a cut of a tensor whose rank is unknown")
            axis = piece.state.axis
            if piece.tensor.shape.rank is None:  # told by Python when the step was traced, not by the operation
                local = self.local_extent(piece.state)
                shape = [each.number for each in dims]
                shape[axis] = local if isinstance(local, int) else None
                piece.tensor.set_shape(shape)
            self.extents.set_dims(value, (*dims[:axis], self.extent(piece.state), *dims[axis + 1 :]))

    def _can_be(self, value: Value, state: State) -> bool:
        """Whether `value` can be brought back from `state`: it must be known where rows are, and how parts combine."""
        if isinstance(state, Rows):
            return self.dims(value) is not None
        return not isinstance(state, Partial) or value.dtype in (*COMBINED_DTYPES, tf.resource)

    def _apply(self, node: Node) -> list[Any]:
        reason = node.reason_to_keep()
        if reason is not None and node.type not in (*first_rank.FUNCTIONS, *first_rank.EFFECTS):
            return self._two_states.as_rows(node, opaque.make(self, node, reason))
        found = self.apart.make(self, node) if self.apart is not None else None
        if found is None and self.sharding.is_on:
            found = self.sharding.make(node)
        return self.apply_rules(node) if found is None else found

    def apply_rules(self, node: Node) -> list[Any]:
        """Makes an operation of what is whole, rows or parts."""
        if all(isinstance(self.state(each), Whole) for each in node.inputs):
            rule = rule_of(node.type, of_whole=True)
            found = rule(self, node) if rule is not None else None
            return self._two_states.as_rows(node, self.make_whole(node)) if found is None else found
        rule = rule_of(node.type)
        found = rule(self, node) if rule is not None else None
        if found is None or not all(self._can_be(value, piece[1]) for value, piece in zip(node.outputs, found)):
            pieces = self.make_whole(node)
            self.report.computed_whole(node, [each for each in node.inputs if isinstance(self.state(each), Rows)])
            return self._two_states.as_rows(node, pieces)
        if all(isinstance(piece[1], Rows) for piece in found):
            self._two_states.keep_whole(node)
        return found
