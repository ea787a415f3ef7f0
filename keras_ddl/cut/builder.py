"""Makes one rank's graph out of the step of one process. See docs/cut.md for the contract.

The nodes of the program are made again, one after the other, in the graph that is being traced. Of each value the
builder knows how this rank holds it (states.py); a rule (rules/) may make an operation from inputs as they are held.
Where there is no rule, or the rule declines, the operation is made from whole inputs, on every rank alike: that is
right for every operation, and rules only make it fast.

Sums over ranks are put off until nothing else can be made: what one backward pass needs summed is then known together,
and goes in buckets.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut import moving, shards
from keras_ddl.cut.collectives import COMBINED_DTYPES, Collectives, Sums
from keras_ddl.cut.dims import Dim, Unknown, dim
from keras_ddl.cut.extents import Dims, Extents
from keras_ddl.cut.pieces import Batch, Piece, Waiting
from keras_ddl.cut.program import Node, Program, Value
from keras_ddl.cut.registry import rule_of
from keras_ddl.cut.report import Report
from keras_ddl.cut.scalars import Scalars
from keras_ddl.cut.schedule import Schedule
from keras_ddl.cut.seeds import agreed_seeds
from keras_ddl.cut.sharding import Sharding
from keras_ddl.cut.states import PARTIAL, SHARD, WHOLE, ListOf, Partial, Rows, Shard, State, Whole
from keras_ddl.cut.two_states import TwoStates
from keras_ddl.errors import ConfigError

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


class Builder:
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
        self.program = program
        self.seed = seed
        self.batch = batch
        self.collectives = collectives
        self.report = report
        rows = Dim(batch.total) if isinstance(batch.total, int) else Dim.unknown("rows")
        self.extents = Extents(rows)
        self.scalars = Scalars(self)
        self.sums = Sums(collectives, report, scope)
        self.exchange = shards.Exchange(collectives, report, scope)
        self.sharding = Sharding(self)
        self.apart: Apart | None = None
        self.in_loop = False  # where nothing can move between ranks
        self.waits_outside = False
        self._pieces: dict[Value, Piece] = {}
        self._made: dict[Any, tf.Tensor] = {}  # a value in another state than it was made in
        self._same: dict[Value, Value] = {}  # what was only passed on, by what it was passed on from
        self._recipes: dict[Value, Callable[[Any], tf.Tensor | None]] = {}
        self._wholes: dict[Value, Callable[[], tf.Tensor]] = {}
        self._of_batch: set[Value] = set()  # what is computed of the batch's entries
        self._own: dict[Node, Value] = {}  # sums that rules make
        self._two_states = TwoStates(self)
        self._done: dict[Node, list[tf.Operation]] = {}
        self._node: Node | None = None
        self.before: list[tf.Operation] = []  # what the node that is made runs after
        self._constants: dict[Any, tf.Tensor] = {}
        self._names = 0
        self.scope = scope
        self._last: list[tf.Operation] = []

    # ---- what rules ask

    @property
    def rows(self) -> Dim:
        """The extent of the batch."""
        return self.extents.rows

    def dims(self, value: Value) -> Dims | None:
        """Returns the extents of the whole tensor; None if its rank is unknown."""
        return self.extents.dims(value)

    def constants(self, value: Value) -> list[int] | None:
        """Returns the entries of an integer tensor of rank 0 or 1 if they are certain, else None."""
        return self.extents.constants(value)

    def is_made(self, value: Value) -> bool:
        """Whether a value was made already; the same on all ranks."""
        return value in self._pieces

    def state(self, value: Value) -> State:
        """Returns how this rank holds `value`."""
        return self._pieces[value].state

    def held(self, value: Value) -> tf.Tensor:
        """Returns what this rank holds of `value`, in the state it is in."""
        return self._pieces[value].tensor

    def extent(self, rows: Rows) -> Dim:
        """Returns the extent of the whole tensor along the axis of a cut."""
        return rows.blocks * self.rows * rows.unit

    def whole(self, value: Value) -> tf.Tensor:
        """Returns the whole tensor. Raises: Waiting: it has yet to be summed."""
        piece = self._pieces[value]
        if isinstance(piece.state, Whole):
            return piece.tensor
        value = self.origin(value)
        found = self._made.get((value, WHOLE))
        if found is not None:
            return found
        if isinstance(piece.state, Shard):
            if value.dtype == tf.resource:
                raise self.sharding.refusal(self._node)
            self.exchange.want_gather(value, piece.tensor, self._node)
            raise Waiting
        if isinstance(piece.state, Partial):
            if value.dtype == tf.resource:
                raise ConfigError(
                    "A variable that accumulates gradients between updates may only be read, assigned and added "
                    "to, nothing "
                    f"else. Received: {self._node} (rank {self.collectives.rank}). Use a separate variable."
                )
            self.sums.want(value, piece.tensor, piece.state.op, self._node)
            raise Waiting
        if value in self._wholes:
            with _no_dependencies():
                found = self._made[value, WHOLE] = self._wholes[value]()
            return found
        with _no_dependencies():
            move = moving.gathered_list if isinstance(piece.state, ListOf) else moving.gathered
            found = move(self, value, piece.tensor, piece.state)
        self._made[value, WHOLE] = found
        self.report.gathered(value, self._node)
        return found

    def pass_on(self, node: Node) -> list[Piece]:
        """Gives the node's inputs as its outputs: what is moved for one need not be moved for the other."""
        for value, output in zip(node.inputs, node.outputs):
            self._same[output] = self.origin(value)
        return [self._pieces[value] for value in node.inputs]

    def summed(self, node: Node, part: Callable[[], tf.Tensor]) -> tf.Tensor:
        """Returns the sum over ranks of what only the rule of `node` knows. Raises: Waiting: it has yet to be summed.

        part: makes this rank's part; called once.
        """
        if node not in self._own:
            tensor = part()
            self._own[node] = Value(tensor, node, -1)
            self._pieces[self._own[node]] = Piece(tensor, PARTIAL)
        return self.whole(self._own[node])

    def wholes(self, values: Sequence[Value]) -> list[tf.Tensor]:
        """Returns the whole tensors. Raises: Waiting: some have yet to be summed; all of them are asked for."""
        for value in values:
            if isinstance(self.state(value), (Partial, Shard)):
                self._attempt(lambda: self.whole(value))  # noqa: B023
        return [self.whole(each) for each in values]

    def cut(self, value: Value, rows: Rows) -> tf.Tensor:
        """Returns this rank's rows of `value`. Raises: Waiting."""
        if self.state(value) == rows:
            return self.held(value)
        value = self.origin(value)
        found = self._made.get((value, rows))
        if found is None:
            found = self._of_recipe(value, rows)
            if found is None:
                whole = self.whole(value)
                with _no_dependencies():
                    found = moving.sliced(self, whole, rows)
            self._made[value, rows] = found
        return found

    def shard(self, value: Value) -> tf.Tensor:
        """Returns this rank's chunk of `value`. Raises: Waiting: it has yet to be summed."""
        piece = self._pieces[value]
        if isinstance(piece.state, Shard):
            return piece.tensor
        value = self.origin(value)
        if (value, SHARD) not in self._made:
            if piece.state == PARTIAL and value.dtype in COMBINED_DTYPES and value.dtype != tf.bool:
                self.exchange.want_scatter(value, piece.tensor, self._node)
                raise Waiting
            whole = self.whole(value)
            with _no_dependencies():
                self._made[value, SHARD] = self.exchange.layout(value).cut(whole, self.collectives.rank)
        return self._made[value, SHARD]

    def shards(self, values: Sequence[Value]) -> list[tf.Tensor]:
        """Returns this rank's chunks. Raises: Waiting: some have yet to be summed; all of them are asked for."""
        for value in values:
            self._attempt(lambda: self.shard(value))  # noqa: B023
        return [self.shard(each) for each in values]

    def part(self, value: Value) -> tf.Tensor:
        """Returns this rank's part of the sum that a whole value is, or that it is a part of."""
        if self.state(value) == PARTIAL:
            return self.held(value)
        key = (self.origin(value), PARTIAL)
        if key not in self._made and self.state(value) == SHARD:
            with _no_dependencies():
                layout = self.exchange.layout(value)
                self._made[key] = shards.part_of(self.held(value), layout, self.collectives.rank)
        if key not in self._made:
            whole = self.whole(value)
            with _no_dependencies():
                self._made[key] = moving.part_of(self, whole)
        return self._made[key]

    def list_of(self, value: Value, state: ListOf) -> tf.Tensor | None:
        """Returns a list in this state; None where it cannot be had."""
        if self.state(value) == state:
            return self.held(value)
        value = self.origin(value)
        if (value, state) not in self._made:
            recipe = self._recipes.get(value)
            with _no_dependencies():
                found = recipe(state) if recipe is not None else None
            if found is None:
                return None
            self._made[value, state] = found
        return self._made[value, state]

    def number_outside(self, unknown: Unknown) -> Any:
        """Returns a number that only the graph around this one knows."""
        raise KeyError(f"{unknown}: no value of this name")

    def _of_recipe(self, value: Value, rows: Rows) -> tf.Tensor | None:
        recipe = self._recipes.get(value)
        if recipe is None or not self.fits(value, rows):
            return None
        with _no_dependencies():
            return recipe(rows)

    def give_whole(self, value: Value, recipe: Callable[[], tf.Tensor]) -> None:
        """Says how all of a value that is held as rows is made on every rank, so that it need not be gathered."""
        self._wholes[value] = recipe

    def is_of_batch(self, value: Value) -> bool:
        """Whether a value is computed of the batch's entries, and not of its extents alone."""
        return value in self._of_batch

    def keep_as_whole(self, value: Value, tensor: tf.Tensor) -> None:
        """Says what all of a value is that is held as rows."""
        self._made[value, WHOLE] = tensor

    def origin(self, value: Value) -> Value:
        """Returns the value of which `value` is only passed on."""
        return self._same.get(value, value)

    def has_whole(self, value: Value) -> bool:
        """Whether all of a value that is held as rows can be had without gathering it."""
        value = self.origin(value)
        return (value, WHOLE) in self._made or value in self._wholes

    def has_recipe(self, value: Value) -> bool:
        """Whether rows of a whole value can be made without making it whole."""
        return value in self._recipes

    def give_recipe(self, value: Value, recipe: Callable[[Any], tf.Tensor | None]) -> None:
        """Says how a rank's rows of a whole value are made. The whole tensor then runs only if something reads it.

        recipe: is given a cut that fits the value (of a list: its state); returns the rows, or None where it cannot
            make them.
        """
        self._recipes[value] = recipe

    def fits(self, value: Value, rows: Rows) -> bool:
        """Whether `value` certainly has the extent of this cut along its axis."""
        dims = self.dims(value)
        return dims is not None and dims[rows.axis] == self.extent(rows)

    def vector(self, dims: Sequence[Dim | int], dtype: tf.DType | None = None) -> Any:
        """Returns integers as a list of ints, or as an int64 vector of the graph; given a dtype, as a vector of it."""
        return self.scalars.vector([self.number(each) for each in dims], dtype)

    def as_vector(self, entries: Sequence[Any], dtype: tf.DType | None = None) -> Any:
        """Returns ints as they are, and anything with int64 scalars in it as a vector; given a dtype, both as one."""
        return self.scalars.vector(entries, dtype)

    def next_name(self, kind: str) -> str:
        """Returns a name for a collective. Ranks count alike; what Keras names may differ between them."""
        self._names += 1
        return f"{self.scope}{kind}_{self._names}"

    def is_only_reshaped(self, value: Value) -> bool:
        """Whether nothing reads `value` but Reshape: then axes of extent 1 do not matter."""
        return all(each is not None and each.type == "Reshape" for each in self.program.readers(value))

    def number(self, value: Dim | int) -> Any:
        """Returns an extent as an int, or as an int64 scalar of the graph."""
        return self.scalars.of(dim(value))

    def local_extent(self, rows: Rows) -> Any:
        """Returns the extent of this rank's tensor along the axis of a cut: an int or an int64 scalar."""
        return self.scalars.times(self.number(rows.blocks * rows.unit), self.batch.mine)

    def local_shape(self, dims: Sequence[Dim], state: State, dtype: tf.DType | None = None) -> Any:
        """Returns the shape of what a rank holds of a tensor of these extents, as `vector` returns integers."""
        shape = [self.local_extent(state) if self._is_cut(state, a) else self.number(d) for a, d in enumerate(dims)]
        return self.as_vector(shape, dtype)

    @staticmethod
    def _is_cut(state: State, axis: int) -> bool:
        return isinstance(state, Rows) and state.axis == axis

    def make(self, node: Node, inputs: Sequence[tf.Tensor], **attrs: Any) -> list[tf.Tensor]:
        """Makes the operation of `node` with these inputs, after the operations it depends on; returns its outputs.

        attrs: attributes in place of the node's.
        """
        operation = node.operation
        known = {key: value for key, value in operation.node_def.attr.items() if not key.startswith("_")}
        known.update(agreed_seeds(node, self.seed))
        known.update(attrs)
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
            with _no_dependencies():
                self._constants[key] = self.make(node, [])[0]
        return self._constants[key]

    # ---- building

    def give(self, value: Value, tensor: Any, state: State, dims: Dims | None = None) -> None:
        """Says what a placeholder of the program is."""
        self._pieces[value] = Piece(tensor, state)
        self._done[value.node] = []
        if isinstance(state, Shard) and value.dtype == tf.resource:
            self.sharding.hold(value)
        elif not isinstance(state, Whole):
            self._of_batch.add(value)
        if dims is not None:
            self.extents.set_dims(value, dims)

    def add_of_batch(self, values: Iterable[Value]) -> None:
        """Says that whole values are computed of the batch's entries."""
        self._of_batch.update(values)

    def give_rows_of(self, value: Value, whole: tf.Tensor, rows: Rows, dims: Dims | None) -> None:
        """Says that a placeholder is held as rows of a tensor that this rank also has whole."""
        self.give(value, moving.sliced(self, whole, rows), rows, dims)
        self.keep_as_whole(value, whole)

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
            self._take_sums(summed)
            self._take_shards(*self.exchange.make(without=summed, rounds=rounds))
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

    def _take_sums(self, found: Mapping[Value, tf.Tensor]) -> None:
        """From now on these values are whole, and what they were passed on as, too: no part of them is summed again."""
        for value, tensor in found.items():
            self._pieces[value] = Piece(tensor, WHOLE)
        for value, origin in self._same.items():
            if origin in found and value in self._pieces:
                self._pieces[value] = self._pieces[origin]

    def _take_shards(self, chunks: Mapping[Value, tf.Tensor], wholes: Mapping[Value, tf.Tensor]) -> None:
        """From now on sums are held in chunks, and what was put together of chunks is also had whole."""
        for value, tensor in chunks.items():
            self._made[value, PARTIAL] = self._pieces[value].tensor
            self._pieces[value] = Piece(tensor, SHARD)
        for value, origin in self._same.items():
            if origin in chunks and value in self._pieces:
                self._pieces[value] = self._pieces[origin]
        self._made.update({(value, WHOLE): tensor for value, tensor in wholes.items()})
        self.sharding.take(wholes)

    def make_it_whole(self, value: Value) -> None:
        """Goes on with all of a value that was held in chunks. Raises: Waiting."""
        whole, chunk = self.whole(value), self.held(value)
        origin = self.origin(value)
        self._made[origin, SHARD] = chunk
        for each in {value, origin, *(v for v, of in self._same.items() if of is origin and v in self._pieces)}:
            self._pieces[each] = Piece(whole, WHOLE)

    def result(self, value: Value, state: State = WHOLE) -> tf.Tensor:
        """Returns a value that `build` was asked for."""
        return self._in_state(value, state)

    def _in_state(self, value: Value, state: State) -> tf.Tensor:
        if self.state(value) == state:
            return self.held(value)
        if isinstance(state, Rows):
            return self.cut(value, state)
        if isinstance(state, Whole):
            return self.whole(value)
        if state == PARTIAL:
            return self.part(value)
        if isinstance(state, Shard):
            return self.shard(value)
        found = self.list_of(value, state) if isinstance(state, ListOf) else None
        if found is not None:
            return found
        raise AssertionError(f"{value} cannot become {state}")

    def _attempt(self, call: Callable[[], Any]) -> bool:
        try:
            call()
        except Waiting:
            return False
        return True

    @property
    def node(self) -> Node | None:
        """The node that is being made."""
        return self._node

    def made_now(self) -> list[tf.Operation]:
        """Returns the operations of the node that is being made, as far as they are there."""
        return list(self._last)

    def ran(self, operation: tf.Operation) -> None:
        """Says that `operation` is one that the node being made consists of: what runs after the node waits for it."""
        self._last.append(operation)

    def _try(self, node: Node) -> bool:
        self._node, self._last = node, []
        self.before = before = [each for one in node.after for each in self._done[one]]
        try:
            with tf.control_dependencies(before):
                pieces = self._apply(node)
        except Waiting:
            return False
        finally:
            self._node = None
        for value, piece in zip(node.outputs, pieces):
            self._keep(value, piece if isinstance(piece, Piece) else Piece(*piece))
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


def _no_dependencies() -> Any:
    # What is moved between states belongs to no operation: waiting for those before one would keep it from overlapping.
    return tf.control_dependencies(None)
