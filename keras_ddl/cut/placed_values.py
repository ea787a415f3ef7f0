"""Tracks the placement of every value of the step, and redistributes values between placements.

Rules request their operands as they need them: replicated, sharded, a flat shard, a part of a sum. A collective that is
bucketed (a sum, a scatter, a gather of flat shards) is requested and delivered later: `Pending` says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut import flat_shards, redistribute
from keras_ddl.cut.collectives import COMBINED_DTYPES, Collectives, Sums
from keras_ddl.cut.dims import Unknown
from keras_ddl.cut.extents import Dims, Extents
from keras_ddl.cut.local_shapes import LocalShapes, no_dependencies
from keras_ddl.cut.placements import (
    FLAT_SHARD,
    PARTIAL,
    REPLICATED,
    Batch,
    FlatShard,
    Partial,
    Pending,
    PlacedTensor,
    Placement,
    Replicated,
    Sharded,
    TensorList,
)
from keras_ddl.cut.program import Node, Program, Value
from keras_ddl.cut.report import Report
from keras_ddl.errors import ConfigError

Materializer = Callable[[Placement], tf.Tensor | None]


class PlacedValues(LocalShapes):
    """The placement and the local tensor of each value of a program. Placements are the same on all ranks.

    Args:
        program: the step of one process.
        batch: the rows, see `Batch`.
        collectives: sums and gathers.
        report: records every collective.
        scope: prefix of the names of collectives; the same on all ranks.
    """

    def __init__(self, program: Program, batch: Batch, collectives: Collectives, report: Report, scope: str) -> None:
        super().__init__(batch)
        self.program = program
        self.collectives = collectives
        self.report = report
        self.scope = scope
        self.extents = Extents(self.rows)
        self.sums = Sums(collectives, report, scope)
        self.exchange = flat_shards.Exchange(collectives, report, scope)
        self.node: Node | None = None  # which is being built
        self._placed: dict[Value, PlacedTensor] = {}
        self._redistributed: dict[tuple[Value, Placement], tf.Tensor] = {}  # in further placements
        self._forwarded: dict[Value, Value] = {}  # outputs of Identity and the like, by the value that they forward
        self._materializers: dict[Value, Materializer] = {}
        self._replicators: dict[Value, Callable[[], tf.Tensor]] = {}
        self._batch_dependent: set[Value] = set()
        self._sums_of_rules: dict[Node, Value] = {}
        self._names = 0

    # ---- what is known of a value

    def dims(self, value: Value) -> Dims | None:
        """Returns the extents of the global tensor; None if its rank is unknown."""
        return self.extents.dims(value)

    def constants(self, value: Value) -> list[int] | None:
        """Returns the entries of an integer tensor of rank 0 or 1 if they are certain, else None."""
        return self.extents.constants(value)

    def is_placed(self, value: Value) -> bool:
        """Whether a value is in the graph already; the same on all ranks."""
        return value in self._placed

    def placement(self, value: Value) -> Placement:
        """Returns the placement of `value`."""
        return self._placed[value].placement

    def local(self, value: Value) -> tf.Tensor:
        """Returns what this rank holds of `value`, in the value's placement."""
        return self._placed[value].tensor

    def origin(self, value: Value) -> Value:
        """Returns the value that `value` forwards; itself if it forwards none."""
        return self._forwarded.get(value, value)

    def depends_on_batch(self, value: Value) -> bool:
        """Whether a value is computed from the batch's entries, and not from its extents alone."""
        return value in self._batch_dependent

    def mark_batch_dependent(self, values: Iterable[Value]) -> None:
        """Marks replicated values that are computed from the batch's entries."""
        self._batch_dependent.update(values)

    def can_shard(self, value: Value, placement: Sharded) -> bool:
        """Whether `value` certainly has the extent of this placement along its axis."""
        dims = self.dims(value)
        return dims is not None and dims[placement.axis] == self.extent(placement)

    def has_replicated(self, value: Value) -> bool:
        """Whether a sharded value is also available replicated, without a gather."""
        value = self.origin(value)
        return (value, REPLICATED) in self._redistributed or value in self._replicators

    def has_materializer(self, value: Value) -> bool:
        """Whether this rank's shard of a replicated value can be built without the global tensor."""
        return value in self._materializers

    # ---- placing values

    def place(self, value: Value, tensor: tf.Tensor, placement: Placement, dims: Dims | None = None) -> None:
        """Sets the local tensor and the placement of a placeholder of the program."""
        self._placed[value] = PlacedTensor(tensor, placement)
        is_variable_in_shards = isinstance(placement, FlatShard) and value.dtype == tf.resource
        if not isinstance(placement, Replicated) and not is_variable_in_shards:
            self._batch_dependent.add(value)
        if dims is not None:
            self.extents.set_dims(value, dims)

    def place_shard_of(self, value: Value, tensor: tf.Tensor, placement: Sharded, dims: Dims | None) -> None:
        """Places this rank's shard of a replicated tensor, which stays available."""
        self.place(value, redistribute.shard(self, tensor, placement), placement, dims)
        self.cache_replicated(value, tensor)

    def new_value(self, node: Node, like: tf.Tensor, tensor: tf.Tensor, placement: Placement) -> Value:
        """Places a tensor that is no value of the program. It belongs to `node`, and has the global shape of `like`."""
        value = Value(like, node, -1)
        self._placed[value] = PlacedTensor(tensor, placement)
        return value

    def forward(self, node: Node) -> list[PlacedTensor]:
        """Returns the node's inputs as its outputs, so that both share what is redistributed."""
        for value, output in zip(node.inputs, node.outputs):
            self._forwarded[output] = self.origin(value)
        return [self._placed[value] for value in node.inputs]

    def cache_replicated(self, value: Value, tensor: tf.Tensor) -> None:
        """Makes a sharded value available replicated: it is `tensor`."""
        self._redistributed[value, REPLICATED] = tensor

    def register_replicator(self, value: Value, replicator: Callable[[], tf.Tensor]) -> None:
        """Makes a sharded value available replicated: `replicator` builds it on every rank, without a gather."""
        self._replicators[value] = replicator

    def register_materializer(self, value: Value, materializer: Materializer) -> None:
        """Lets a rank build its shard of a replicated value alone. The global tensor then runs only if it is read.

        materializer: given a placement that fits the value, returns the local tensor; None where it cannot build it.
        """
        self._materializers[value] = materializer

    def accept_sums(self, sums: Mapping[Value, tf.Tensor]) -> None:
        """Replicates these values from now on, and those that forward them: no part of them is summed again."""
        self._replace({value: PlacedTensor(tensor, REPLICATED) for value, tensor in sums.items()})

    def accept_shards(self, chunks: Mapping[Value, tf.Tensor], gathered: Mapping[Value, tf.Tensor]) -> None:
        """Holds these sums in flat shards from now on; gathered flat shards are also available replicated."""
        for value in chunks:
            self._redistributed[value, PARTIAL] = self._placed[value].tensor
        self._replace({value: PlacedTensor(tensor, FLAT_SHARD) for value, tensor in chunks.items()})
        self._redistributed.update({(value, REPLICATED): tensor for value, tensor in gathered.items()})

    def _replace(self, placed: Mapping[Value, PlacedTensor]) -> None:
        self._placed.update(placed)
        for value, origin in self._forwarded.items():
            if origin in placed and value in self._placed:
                self._placed[value] = self._placed[origin]

    # ---- redistribution

    def replicated(self, value: Value) -> tf.Tensor:
        """Returns the global tensor. Raises: Pending: a collective is to come."""
        tensor, placement = self._placed[value]
        if isinstance(placement, Replicated):
            return tensor
        value = self.origin(value)
        result = self._redistributed.get((value, REPLICATED))
        if result is not None:
            return result
        if isinstance(placement, FlatShard):
            if value.dtype == tf.resource:
                raise flat_shards.refusal(self.node, self.collectives.rank)
            self.exchange.want_gather(value, tensor, self.node)
            raise Pending
        if isinstance(placement, Partial):
            if value.dtype == tf.resource:
                raise ConfigError(
                    "A variable that accumulates gradients between updates may only be read, assigned and added to, "
                    f"nothing else. Received: {self.node} (rank {self.collectives.rank}). Use a separate variable."
                )
            self.sums.want(value, tensor, placement.op, self.node)
            raise Pending
        with no_dependencies():
            if value in self._replicators:
                result = self._replicators[value]()
            else:
                result = self._gathered(value, tensor, placement)
                self.report.gathered(value, self.node)
        self._redistributed[value, REPLICATED] = result
        return result

    def _gathered(self, value: Value, tensor: tf.Tensor, placement: Sharded | TensorList) -> tf.Tensor:
        name = self.next_name("gather")
        if isinstance(placement, Sharded):
            dims = self.dims(value)
            assert dims is not None, f"{value}: a shard of a tensor whose rank is unknown"
            extent = lambda axis: self.number(dims[axis])  # noqa: E731
            result = redistribute.all_gather(self, self.collectives, name, tensor, placement, extent)
            result.set_shape([each.number for each in dims])
            return result
        content = self.extents.content(value)
        gather = redistribute.all_gather_optional if placement.optional else redistribute.all_gather_list
        elements = content.known_dims() if content is not None else None
        return gather(self, self.collectives, name, tensor, placement, elements)

    def all_replicated(self, values: Sequence[Value]) -> list[tf.Tensor]:
        """Returns the global tensors. Raises: Pending: collectives are to come; all of them are requested."""
        for value in values:
            if isinstance(self.placement(value), (Partial, FlatShard)):
                self._attempt(lambda: self.replicated(value))  # noqa: B023
        return [self.replicated(each) for each in values]

    def replicate(self, value: Value) -> None:
        """Replicates a value that was in flat shards from now on. Raises: Pending."""
        tensor, chunk = self.replicated(value), self.local(value)
        origin = self.origin(value)
        self._redistributed[origin, FLAT_SHARD] = chunk
        self._placed[value] = PlacedTensor(tensor, REPLICATED)
        self._replace({origin: PlacedTensor(tensor, REPLICATED)})

    def sum_over_ranks(self, node: Node, part: Callable[[], tf.Tensor]) -> tf.Tensor:
        """Returns a sum that is no value of the program, for the rule of `node`. Raises: Pending.

        part: builds this rank's part; called once.
        """
        if node not in self._sums_of_rules:
            tensor = part()
            self._sums_of_rules[node] = self.new_value(node, tensor, tensor, PARTIAL)
        return self.replicated(self._sums_of_rules[node])

    def sharded(self, value: Value, placement: Sharded) -> tf.Tensor:
        """Returns this rank's shard of `value`. Raises: Pending."""
        if self.placement(value) == placement:
            return self.local(value)
        value = self.origin(value)
        key = value, placement
        if key not in self._redistributed:
            shard = self._materialized(value, placement) if self.can_shard(value, placement) else None
            if shard is None:
                tensor = self.replicated(value)
                with no_dependencies():
                    shard = redistribute.shard(self, tensor, placement)
            self._redistributed[key] = shard
        return self._redistributed[key]

    def flat_shard(self, value: Value) -> tf.Tensor:
        """Returns this rank's flat shard of `value`. Raises: Pending."""
        tensor, placement = self._placed[value]
        if isinstance(placement, FlatShard):
            return tensor
        value = self.origin(value)
        key = value, FLAT_SHARD
        if key not in self._redistributed:
            if placement == PARTIAL and value.dtype in COMBINED_DTYPES and value.dtype != tf.bool:
                self.exchange.want_scatter(value, tensor, self.node)
                raise Pending
            tensor = self.replicated(value)
            with no_dependencies():
                self._redistributed[key] = self.exchange.layout(value).cut(tensor, self.collectives.rank)
        return self._redistributed[key]

    def flat_shards(self, values: Sequence[Value]) -> list[tf.Tensor]:
        """Returns this rank's flat shards. Raises: Pending: collectives are to come; all of them are requested."""
        for value in values:
            self._attempt(lambda: self.flat_shard(value))  # noqa: B023
        return [self.flat_shard(each) for each in values]

    def partial(self, value: Value) -> tf.Tensor:
        """Returns this rank's part of a sum that `value` is. Raises: Pending."""
        if self.placement(value) == PARTIAL:
            return self.local(value)
        key = self.origin(value), PARTIAL
        if key not in self._redistributed:
            if isinstance(self.placement(value), FlatShard):
                layout, chunk = self.exchange.layout(value), self.local(value)
                with no_dependencies():
                    self._redistributed[key] = flat_shards.partial(chunk, layout, self.collectives.rank)
            else:
                tensor = self.replicated(value)
                with no_dependencies():
                    self._redistributed[key] = redistribute.partial(tensor, self.collectives.rank)
        return self._redistributed[key]

    def tensor_list(self, value: Value, placement: TensorList) -> tf.Tensor | None:
        """Returns a list in this placement; None where that is not possible."""
        if self.placement(value) == placement:
            return self.local(value)
        value = self.origin(value)
        key = value, placement
        if key not in self._redistributed:
            result = self._materialized(value, placement)
            if result is None:
                return None
            self._redistributed[key] = result
        return self._redistributed[key]

    def _materialized(self, value: Value, placement: Placement) -> tf.Tensor | None:
        materializer = self._materializers.get(value)
        with no_dependencies():
            return materializer(placement) if materializer is not None else None

    def redistributed(self, value: Value, placement: Placement) -> tf.Tensor:
        """Returns a value in a placement. Raises: Pending."""
        if self.placement(value) == placement:
            return self.local(value)
        if isinstance(placement, Sharded):
            return self.sharded(value, placement)
        if isinstance(placement, Replicated):
            return self.replicated(value)
        if isinstance(placement, FlatShard):
            return self.flat_shard(value)
        result = self.tensor_list(value, placement) if isinstance(placement, TensorList) else None
        if placement == PARTIAL:
            result = self.partial(value)
        if result is None:
            raise AssertionError(f"{value} cannot become {placement}")
        return result

    def next_name(self, kind: str) -> str:
        """Returns a name for a collective. Ranks count alike; what Keras names may differ between them."""
        self._names += 1
        return f"{self.scope}{kind}_{self._names}"

    def _look_up(self, unknown: Unknown) -> tf.Tensor:
        key, at = unknown.operands
        value = self.extents.named.get(str(key))
        if value is None:
            return self.outer_number(unknown)
        if unknown.kind == "extent":
            # An extent without a name of its own is not that of a sharded axis: the local tensor has the same.
            local = self.local(value)
            with no_dependencies():
                return tf.shape(local, out_type=tf.int64)[at]
        tensor = self.replicated(value)
        with no_dependencies():
            return tf.cast(tf.reshape(tensor, [-1])[at], tf.int64)

    def outer_number(self, unknown: Unknown) -> tf.Tensor:
        """Returns a number that only the graph around this one knows."""
        raise KeyError(f"{unknown}: no value of this name")

    def _attempt(self, call: Callable[[], tf.Tensor]) -> bool:
        try:
            call()
        except Pending:
            return False
        return True
