"""Tries a layout without building the step, to learn the cost of its collectives and which variables go together.

Along the model axis everything that is not computed from sharded variables is replicated and costs nothing. So only
operations that shards and parts reach are built, by the specs and rules of the cut itself, in a graph that never runs;
for everything else shapes suffice. The time of a trial depends on the number of these operations, not on the size of
the step.

A replicated variable that a trial reads or assigns by slices goes together with the cut ones: its slices cost nothing,
and its gradient arrives in slices. `TriedLayout.joins` names such variables.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from keras_ddl.compat.tensorflow import FuncGraph, UninitializedVariable, tf, variable_dtype, variable_shape
from keras_ddl.cut.analysis.dims import ONE, Dim, certain, if_certain
from keras_ddl.cut.analysis.extents import Extents
from keras_ddl.cut.analysis.placements import REPLICATED, Batch, PlacedTensor, Placement, Sharded, TensorList
from keras_ddl.cut.analysis.program import Node, Program, Value
from keras_ddl.cut.analysis.report import Report
from keras_ddl.cut.analysis.variable_ops import ASSIGNS, READ
from keras_ddl.cut.analysis.work import bytes_of
from keras_ddl.cut.axes.model_axis import argument_dims
from keras_ddl.cut.building.builder import Builder
from keras_ddl.cut.rules.shapes import placement_after
from keras_ddl.cut.values.collectives import PLAIN, Collectives, Reduction
from keras_ddl.cut.values.layouts import Slices

GATHER_WEIGHT = 4  # weight of a gathered byte, because activations that are needed in full should not be cut


class TooManyBytes(ValueError):
    """Raised when a trial ends early, because the layout moves more bytes than allowed."""


@dataclass
class TriedLayout:
    """The result of a trial.

    Attributes:
        bytes: bytes of its collectives, with gathers times GATHER_WEIGHT. Open extents count as FEW_ROWS.
        bytes_of_joins: the part of `bytes` that is for assigning slices to `joins`.
        joins: by handle, uncut variables whose slices are used, with the axis of the slices.
        sharded: operations that have sharded operands.
    """

    bytes: int = 0
    bytes_of_joins: int = 0
    joins: dict[Value, int] = field(default_factory=dict)
    sharded: set[Node] = field(default_factory=set)


class Trials:
    """Tries layouts of one program for a model axis of `size` ranks. placements: as for `cut_along_model`.

    Attributes: built: number of operations that the last trial built.
    """

    def __init__(self, program: Program, size: int, placements: Sequence[Placement] = ()) -> None:
        self.program, self._size, self._placements = program, size, placements
        self._extents: Extents | None = None
        self.built = 0

    def run(self, layout: Mapping[Value, int], most_bytes: float = math.inf) -> TriedLayout:
        """Tries a layout: the axis along which each variable, by its handle, is cut.

        most_bytes: the most bytes that it may move, without the bytes for assigning slices to `TriedLayout.joins`.
        Raises: ConfigError, ValueError: it cannot be built. TooManyBytes: it moves more.
        """
        result = TriedLayout()
        with FuncGraph("trial").as_default():
            ranks, costs = _NoRanks(self._size), _Costs(result, most_bytes)
            batch = Batch(self._size, 1, 0)
            trial = _Trial(program=self.program, batch=batch, collectives=ranks, everyone=None, report=costs)
            trial.begin(result, self._extents, self._placements)
            self._extents = trial.extents
            try:
                trial.run(layout)
            finally:
                self.built = trial.built
        return result


class _NoRanks(Collectives):
    """Collectives of a graph that never runs and has no flat shards; one collective for every tensor."""

    rank = 0

    def __init__(self, size: int) -> None:
        self.size = size

    def reduce(self, tensors: Sequence[tf.Tensor], op: str, name: str, how: Reduction = PLAIN) -> list[tf.Tensor]:
        return [tf.identity(each) for each in tensors]

    def gather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        return tf.raw_ops.PlaceholderWithDefault(input=tensor, shape=[None, *tensor.shape[1:]])

    def buckets(self, sizes: Sequence[int], dtypes: Sequence[str]) -> list[list[int]]:
        return [[each] for each in range(len(sizes))]


class _Costs(Report):
    """A report that adds up the cost of collectives."""

    def __init__(self, result: TriedLayout, most_bytes: float) -> None:
        super().__init__()
        self._result, self._most = result, most_bytes

    def gathered(self, value: Value, reader: Node | None) -> None:
        self._add(GATHER_WEIGHT * bytes_of([value]))

    def bucketed(
        self, kind: str, values: Sequence[Value], readers: Sequence[Node | None], compressed: bool = False
    ) -> None:
        self._add(bytes_of(values))

    def _add(self, bytes_: int) -> None:
        self._result.bytes += bytes_
        if self._result.bytes - self._result.bytes_of_joins > self._most:
            raise TooManyBytes


class _Replicated(dict[Value, PlacedTensor]):
    """The placed values. All others are replicated, and get a tensor on first access."""

    def __missing__(self, value: Value) -> PlacedTensor:
        known = value.constant() if value.node.type == "Const" or value.dtype.is_integer else None
        if known is not None:
            tensor = tf.constant(known, value.dtype)
        else:
            tensor = tf.compat.v1.placeholder(value.dtype, value.shape)
        self[value] = placed = PlacedTensor(tensor, REPLICATED)
        return placed


class _Trial(Builder):
    """Builds only operations that shards and parts reach."""

    def begin(self, result: TriedLayout, extents: Extents | None, placements: Sequence[Placement]) -> None:
        """Prepares for a program; reuses the extents that an earlier trial has inferred, if any."""
        self._result = result
        self._placed = _Replicated()
        self._operations_by_node = defaultdict(list)
        self.updates = None  # slices must reach assignments, which show which variables go together
        self._queue: list[int] = []  # positions, a heap
        self._queued: set[int] = set()
        self._waiting: dict[Node, None] = {}
        self.built = 0
        self._slices: list[tf.Variable] = []  # kept alive, without memory
        if extents is not None:
            self.extents = extents
            return
        for value, dims in argument_dims(self.program, placements).items():
            self.extents.named[value.key] = value
            self.extents.set_dims(value, dims)
        for node in self.program.nodes:
            for value in node.outputs:
                self.extents.follow(value)

    def run(self, layout: Mapping[Value, int]) -> None:
        """Builds the operations that a layout affects, and replicates the outputs of the program."""
        for handle, axis in layout.items():
            shape, dtype = certain(variable_shape(handle.tensor)), certain(variable_dtype(handle.tensor))
            slices = Slices(tuple(shape.as_list()), self.collectives.size, axis)
            with tf.init_scope():
                self._slices.append(
                    UninitializedVariable(trainable=False, shape=slices.shape_of_slice, dtype=dtype, name="slice")
                )
            self.place(handle, self._slices[-1].handle, slices.placement)
            self._reach(handle)
        for rounds in itertools.count():
            while self._queue:
                self._make_next()
            for value in self.program.outputs:
                if self.is_placed(value):
                    self.request(value, REPLICATED)
            if not self.requests:
                return
            self.make_requested(rounds)
            waiting, self._waiting = self._waiting, {}
            for node in waiting:
                self._queued.discard(node.position)
                self._push(node)

    def _reach(self, value: Value) -> None:
        for node in self.program.readers(value):
            if node.type != "Return":
                self._push(node)

    def _push(self, node: Node) -> None:
        if node.position not in self._queued:
            self._queued.add(node.position)
            heapq.heappush(self._queue, node.position)

    def _make_next(self) -> None:
        node = self.program.nodes[heapq.heappop(self._queue)]
        placed = [self.placement(each) for each in node.inputs if self.is_placed(each)]
        if all(each == REPLICATED for each in placed):
            if any(each.node in self._waiting for each in node.inputs):
                self._waiting[node] = None
            return
        if any(each.node in self._waiting for each in node.inputs) or not self._try_to_build(node):
            self._waiting[node] = None
            return
        self.built += 1
        if any(isinstance(each, Sharded) for each in placed):
            self._result.sharded.add(node)
        for value in node.outputs:
            if self.placement(value) != REPLICATED:
                self._reach(value)

    # ---- variables that go together

    def _replicate(self, value: Value) -> tf.Tensor:
        node, placement = self.node, self.placement(value)
        handle = node.inputs[0] if node is not None and node.type in ASSIGNS and value is node.inputs[1] else None
        if handle is not None and isinstance(placement, Sharded) and self._join(handle, placement):
            self._result.bytes_of_joins += GATHER_WEIGHT * bytes_of([value])
        return super()._replicate(value)

    def _shard(self, value: Value, placement: Sharded | TensorList) -> tf.Tensor:
        if isinstance(placement, Sharded) and self.placement(value) == REPLICATED:
            if_certain(self._join_variable_of, value, placement)
        return super()._shard(value, placement)

    def _join_variable_of(self, value: Value, placement: Sharded) -> None:
        """Joins the variable from which a value is read, at most reshaped, transposed or cast. Raises: Uncertain."""
        while value.node.type != READ:
            before = value.node.inputs[0] if value.node.inputs else None
            if before is None:
                return
            if value.node.type == "Reshape":
                placement = placement_after(self.dims(value), self.dims(before), placement, self.rows_of(placement))
            elif value.node.type == "Transpose":
                placement = placement.at(self.extents.constants(value.node.inputs[1])[placement.axis])
            elif value.node.type not in ("Identity", "Cast"):
                return
            value = before
        self._join(value.node.inputs[0], placement)

    def _join(self, handle: Value, placement: Sharded) -> bool:
        """Joins a variable if a rank has or needs a slice of it. Returns False if it is not a slice along one axis."""
        shape = variable_shape(handle.source().tensor)
        if shape is None or shape.rank is None or placement.axis >= shape.rank:
            return False
        extent = shape[placement.axis]
        unit = Dim(extent).divided_by(self.rows) if extent else None
        if unit is None or placement != Sharded(placement.axis, ONE, unit):
            return False
        return self._result.joins.setdefault(handle.source(), placement.axis) == placement.axis
