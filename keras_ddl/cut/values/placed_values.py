"""Tracks the placement of every value of the step, and redistributes values between placements.

Rules request their operands in the placement that they need: replicated, sharded, a flat shard, or a part of a sum. A
bucketed collective (a sum, a scatter, a gather of flat shards) is only requested and comes later; until then `Pending`
is raised.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.analysis.dims import Dim, Uncertain, Unknown, certain, if_certain
from keras_ddl.cut.analysis.extents import Dims, Extents
from keras_ddl.cut.analysis.placements import (
    FLAT_SHARD,
    PARTIAL,
    REPLICATED,
    Partial,
    Pending,
    PlacedTensor,
    Placement,
    Sharded,
    TensorList,
    has_shards,
)
from keras_ddl.cut.analysis.program import Node, Program, Value
from keras_ddl.cut.analysis.report import Report
from keras_ddl.cut.values import flat_shards, redistribute
from keras_ddl.cut.values.collectives import COMBINED_DTYPES, Collectives
from keras_ddl.cut.values.layouts import Layout
from keras_ddl.cut.values.local_shapes import LocalShapes, no_dependencies
from keras_ddl.cut.values.requests import ALL_GATHER, REDUCE_SCATTER, Requests
from keras_ddl.errors import ConfigError

Materializer = Callable[[Sharded | TensorList], tf.Tensor]


@dataclass(kw_only=True, eq=False)
class PlacedValues(LocalShapes):
    """The placement and the local tensor of each value of a program. Placements are the same on all ranks.

    Args:
        batch: the rows, see `Batch`.
        program: the step of one process, or the graph of a branch or a loop in it.
        collectives: sums and gathers.
        report: records every collective.
        scope: prefix of the names of collectives; the same on all ranks.
        everyone: collectives of all ranks of the mesh; only the first rank runs host functions. None: the step will be
            cut along another axis, and host functions are left to the last cut.
        earlier: collectives of the axis along which the program was cut before; None: it is the step of one process.
    """

    program: Program
    collectives: Collectives
    report: Report
    everyone: Collectives | None
    earlier: Collectives | None = None
    scope: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.extents = Extents(self.rows)
        self.requests = Requests(self.collectives, self.report, self.scope)
        self.node: Node | None = None  # the node that is being built
        self._placed: dict[Value, PlacedTensor] = {}
        self._redistributed: dict[tuple[Value, Placement], tf.Tensor] = {}  # values in additional placements
        self._forwarded: dict[Value, Value] = {}  # outputs of Identity and similar -> the value that they forward
        self._materializers: dict[Value, Materializer] = {}
        self._replicators: dict[Value, Callable[[], tf.Tensor]] = {}
        self._batch_dependent: set[Value] = set()
        self._parts_of_rules: dict[Node, dict[str, Value]] = {}  # by name
        self._names = 0

    @property
    def rows_by_extent(self) -> bool:
        """Whether an axis with the batch's extent may be taken for the batch's rows, not the ranks of a model axis."""
        return self.everyone is not None

    # ---- properties of a value

    def dims(self, value: Value) -> Dims:
        """Returns the extents of the global tensor. Raises: Uncertain: its rank is unknown."""
        return self.extents.dims(value)

    def is_placed(self, value: Value) -> bool:
        """Whether a value is already in the graph; the same on all ranks."""
        return value in self._placed

    def placement(self, value: Value) -> Placement:
        return self._placed[value].placement

    def local(self, value: Value) -> tf.Tensor:
        """Returns this rank's part of `value`, in the value's placement."""
        return self._placed[value].tensor

    def origin(self, value: Value) -> Value:
        """Returns the value that `value` forwards; `value` itself if it forwards none."""
        return self._forwarded.get(value, value)

    def depends_on_batch(self, value: Value) -> bool:
        """Whether a value is computed from the batch's entries, and not from its extents alone."""
        return value in self._batch_dependent

    def mark_batch_dependent(self, values: Iterable[Value]) -> None:
        self._batch_dependent.update(values)

    def layout(self, value: Value) -> Layout:
        return flat_shards.layout_of(value, self.collectives.size)

    def can_shard(self, value: Value, placement: Sharded) -> bool:
        """Whether `value` certainly has the extent of this placement along its axis."""
        dims = if_certain(self.dims, value)
        if dims is None or placement.axis >= len(dims):
            return False
        return dims[placement.axis] == self.extent(placement)

    def has_replicated(self, value: Value) -> bool:
        """Whether a sharded value is also available replicated, without a gather."""
        value = self.origin(value)
        return (value, REPLICATED) in self._redistributed or value in self._replicators

    def has_materializer(self, value: Value) -> bool:
        """Whether this rank can build its shard of a replicated value without the global tensor."""
        return value in self._materializers

    def earlier_kind(self, node: Node) -> str | None:
        """Returns the kind of collective, if an operation is one of the earlier axis, else None."""
        return None if self.earlier is None else self.earlier.kind_of(node)

    # ---- placing values

    def place(self, value: Value, tensor: tf.Tensor, placement: Placement, dims: Dims | None = None) -> None:
        """Sets the local tensor and the placement of a placeholder of the program."""
        self._placed[value] = PlacedTensor(tensor, placement)
        is_variable_in_shards = has_shards(placement) and value.dtype == tf.resource
        if placement != REPLICATED and not is_variable_in_shards:
            self._batch_dependent.add(value)
        if dims is not None:
            self.extents.set_dims(value, dims)

    def input_dims(self, value: Value, placement: Placement) -> Dims | None:
        """Returns the extents of an argument of the step that has this placement; None: its rank is unknown."""
        if value.rank is None:
            return None
        self.extents.named[value.key] = value
        dims = [
            Dim(extent) if extent is not None else Dim.unknown("extent", value.key, axis)
            for axis, extent in enumerate(value.shape.as_list())
        ]
        if isinstance(placement, Sharded):
            dims[placement.axis] = self.extent(placement)
        return tuple(dims)

    def place_shard_of(self, value: Value, tensor: tf.Tensor, placement: Sharded, dims: Dims | None) -> None:
        """Places this rank's shard of a replicated tensor, which stays available."""
        self.place(value, redistribute.shard(self, tensor, placement), placement, dims)
        self.cache_replicated(value, tensor)

    def new_value(self, node: Node, like: tf.Tensor, tensor: tf.Tensor, placement: Placement) -> Value:
        """Places a tensor that is not a value of the program, but belongs to `node`. `like`: has its global shape."""
        value = Value(like, node, -1)
        self._placed[value] = PlacedTensor(tensor, placement)
        return value

    @contextlib.contextmanager
    def placed_as(self, placed: Mapping[Value, PlacedTensor]) -> Iterator[None]:
        """Gives these values other tensors and placements within the block."""
        before = {value: self._placed[value] for value in placed}
        self._placed.update(placed)
        try:
            yield
        finally:
            self._placed.update(before)

    def forward(self, node: Node) -> list[PlacedTensor]:
        """Returns a node's inputs as its outputs, so that an input and its output share redistributed tensors."""
        for value, output in zip(node.inputs, node.outputs):
            self._forwarded[output] = self.origin(value)
        return [self._placed[value] for value in node.inputs]

    def cache_replicated(self, value: Value, tensor: tf.Tensor) -> None:
        """Makes a sharded value also available replicated, as `tensor`."""
        self._redistributed[value, REPLICATED] = tensor

    def register_replicator(self, value: Value, replicator: Callable[[], tf.Tensor]) -> None:
        """Makes a sharded value also available replicated: `replicator` builds it on every rank, without a gather."""
        self._replicators[value] = replicator

    def register_materializer(self, value: Value, materializer: Materializer) -> None:
        """Lets a rank build only its shard of a replicated value. The global tensor is computed only if it is read.

        materializer: given a placement that fits the value, returns the local tensor, or raises Uncertain.
        """
        self._materializers[value] = materializer

    def make_requested(self, rounds: int) -> None:
        """Makes the requested collectives. COLLECTIVE. `rounds`: see `Requests.make`.

        From then on parts, and values that forward them, have their new placement, so no part is summed again.
        """
        placed, gathered = self.requests.make(rounds)
        for value, (_, placement) in placed.items():
            before = self._placed[value]
            if placement == FLAT_SHARD and before.placement == PARTIAL:
                self._redistributed[value, PARTIAL] = before.tensor
        self.place_again(placed)
        self._redistributed.update({(value, REPLICATED): tensor for value, tensor in gathered.items()})

    def place_again(self, placed: Mapping[Value, PlacedTensor]) -> None:
        """Changes the placements of values, and of the values that forward them."""
        self._placed.update(placed)
        for value, origin in self._forwarded.items():
            if origin in placed and value in self._placed:
                self._placed[value] = self._placed[origin]

    # ---- redistribution

    def redistributed(self, value: Value, placement: Placement) -> tf.Tensor:
        """Returns this rank's part of a value in a placement.

        Raises: Pending: a collective is still to come. Uncertain: it is a list that cannot have this placement.
        """
        if self.placement(value) == placement:
            return self.local(value)
        key = self.origin(value), placement
        if key not in self._redistributed:
            self._redistributed[key] = self._redistribute(*key)
        return self._redistributed[key]

    def replicated(self, value: Value) -> tf.Tensor:
        """Returns the global tensor. Raises: Pending."""
        return self.redistributed(value, REPLICATED)

    def request(self, value: Value, placement: Placement) -> bool:
        """Redistributes a value, or requests the collective that this needs. Returns: whether the result is ready."""
        try:
            self.redistributed(value, placement)
        except Pending:
            return False
        return True

    def all_redistributed(self, values: Sequence[Value], placement: Placement) -> list[tf.Tensor]:
        """Returns values in a placement. Raises: Pending: collectives are missing; all of them are requested."""
        for value in values:
            if self.placement(value) == FLAT_SHARD or isinstance(self.placement(value), Partial):
                self.request(value, placement)
        return [self.redistributed(each, placement) for each in values]

    def all_replicated(self, values: Sequence[Value]) -> list[tf.Tensor]:
        """Returns the global tensors. Raises: Pending, as `all_redistributed` does."""
        return self.all_redistributed(values, REPLICATED)

    def _redistribute(self, value: Value, placement: Placement) -> tf.Tensor:
        """Builds a value in a placement that it does not have."""
        if placement == REPLICATED:
            return self._replicate(value)
        if isinstance(placement, (Sharded, TensorList)):
            return self._shard(value, placement)
        if placement == FLAT_SHARD:
            return self._shard_flat(value)
        assert placement == PARTIAL, f"{value} cannot become {placement}"
        if self.placement(value) == FLAT_SHARD:
            with no_dependencies():
                return flat_shards.partial(self.local(value), self.layout(value), self.collectives.rank)
        tensor = self.replicated(value)
        with no_dependencies():
            return redistribute.partial(tensor, self.collectives.rank, is_cut_again=self.everyone is None)

    def _shard(self, value: Value, placement: Sharded | TensorList) -> tf.Tensor:
        shard = if_certain(self._materialized, value, placement)
        if shard is not None:
            return shard
        if isinstance(placement, TensorList):
            raise Uncertain
        tensor = self.replicated(value)
        with no_dependencies():
            return redistribute.shard(self, tensor, placement)

    def _shard_flat(self, value: Value) -> tf.Tensor:
        if self.placement(value) == PARTIAL and value.dtype in COMBINED_DTYPES and value.dtype != tf.bool:
            self.requests.add(REDUCE_SCATTER, value, self.local(value), self.node)
            raise Pending
        tensor = self.replicated(value)
        with no_dependencies():
            return self.layout(value).cut(tensor, self.collectives.rank)

    def _materialized(self, value: Value, placement: Sharded | TensorList) -> tf.Tensor:
        materializer = certain(self._materializers.get(value))
        if isinstance(placement, Sharded) and not self.can_shard(value, placement):
            raise Uncertain
        with no_dependencies():
            return materializer(placement)

    def _replicate(self, value: Value) -> tf.Tensor:
        tensor, placement = self._placed[value]
        if has_shards(placement) and value.dtype == tf.resource:
            raise self.refusal_of_sharded(self.node, placement)
        if placement == FLAT_SHARD:
            self.requests.add(ALL_GATHER, value, tensor, self.node)
            raise Pending
        if isinstance(placement, Partial):
            if value.dtype == tf.resource:
                raise ConfigError(
                    "A variable that accumulates gradients between updates may only be read, assigned and added to. "
                    f"Received: {self.node} (rank {self.collectives.rank}). Use a separate variable."
                )
            self.requests.add(placement.op, value, tensor, self.node)
            raise Pending
        with no_dependencies():
            if value in self._replicators:
                return self._replicators[value]()
            assert isinstance(placement, (Sharded, TensorList)), f"{value} is {placement}"
            result = self._all_gather(value, tensor, placement)
        self.report.gathered(value, self.node)
        return result

    def refusal_of_sharded(self, node: Node | None, placement: Placement) -> ConfigError:
        """Returns the error for an operation that cannot use a variable that is held sharded or in flat shards."""
        if placement == FLAT_SHARD:
            return flat_shards.refusal(node, self.collectives.rank)
        return ConfigError(
            "A variable that is cut along the model axis supports only reading, lookups, assignment and addition in a "
            f"step; in a loop only reading. Received: {node} (rank {self.collectives.rank} of the model axis). Leave "
            "the variable out of the layout."
        )

    def _all_gather(self, value: Value, tensor: tf.Tensor, placement: Sharded | TensorList) -> tf.Tensor:
        name = self.next_name("gather")
        if isinstance(placement, Sharded):
            dims = self.dims(value)
            extent = lambda axis: self.number(dims[axis])  # noqa: E731
            result = redistribute.all_gather(self, self.collectives, name, tensor, placement, extent)
            result.set_shape([each.number for each in dims])
            return result
        content = if_certain(self.extents.content, value)
        gather = redistribute.all_gather_optional if placement.optional else redistribute.all_gather_list
        elements = content.known_dims() if content is not None else None
        return gather(self, self.collectives, name, tensor, placement, elements)

    def keep_replicated(self, value: Value) -> None:
        """Replicates a value that was in flat shards, permanently. Raises: Pending."""
        tensor, origin = self.replicated(value), self.origin(value)
        if self.placement(value) == REPLICATED:  # it was rebuilt from sums rather than gathered
            return
        self._redistributed[origin, FLAT_SHARD] = self.local(value)
        self.place_again({each: PlacedTensor(tensor, REPLICATED) for each in (value, origin)})

    def sum_over_ranks(self, node: Node, part: Callable[[], tf.Tensor]) -> tf.Tensor:
        """Returns a sum over ranks that the rule of `node` needs and the program does not have. Raises: Pending.

        part: builds this rank's part of the sum; called once.
        """
        return self.combined_over_ranks(node, {"sum": part})["sum"]

    def combined_over_ranks(
        self, node: Node, parts: Mapping[str, Callable[[], tf.Tensor]], op: str = "sum"
    ) -> dict[str, tf.Tensor]:
        """Returns, by name, combinations over ranks that the rule of `node` needs and the program does not have.

        parts: functions that build this rank's parts; each is called once.
        Raises: Pending, after requesting all combinations.
        """
        values = self._parts_of_rules.setdefault(node, {})
        for name, part in parts.items():
            if name not in values:
                tensor = part()
                values[name] = self.new_value(node, tensor, tensor, Partial(op))
        tensors = self.all_replicated([values[name] for name in parts])
        return dict(zip(parts, tensors))

    def next_name(self, kind: str) -> str:
        """Returns a name for a collective. All ranks count in the same way; names from Keras may differ."""
        self._names += 1
        return f"{self.scope}{kind}_{self._names}"

    def _look_up(self, unknown: Unknown) -> tf.Tensor:
        key, at = unknown.operands
        value = self.extents.named.get(str(key))
        if value is None:
            return self.outer_number(unknown)
        if not self.is_placed(value):
            alike = filter(self.is_placed, self.extents.alike.get(str(key), ()))
            value = next((each for each in alike if not isinstance(self.placement(each), Sharded)), value)
        if unknown.kind == "extent":
            # Extents of sharded axes have other names, so the local tensor has this extent, too.
            local = self.local(value)
            with no_dependencies():
                return tf.shape(local, out_type=tf.int64)[at]
        tensor = self.replicated(value)
        with no_dependencies():
            if unknown.kind == "segments":
                return tf.concat([[0], tf.cast(tensor[-1:], tf.int64) + 1], axis=0)[-1]
            return tf.cast(tf.reshape(tensor, [-1])[at], tf.int64)

    def outer_number(self, unknown: Unknown) -> tf.Tensor:
        """Returns a number that only the enclosing graph knows."""
        raise KeyError(f"{unknown}: no value of this name")
