"""Gathers weights in flat shards where a step needs complete ones, and only for as long as it does.

A gathered weight serves the operations that are built soon after the first one that needs it. For later operations, as
in the backward pass, it is gathered again, so that gathered weights never exceed a bound, or what one operation needs.
Operations are built in an order in which they can run. So the least recently used weight makes room for the next one,
whose gather waits until the users of the old one have run. No rank holds all weights, and gathers run ahead of the
computation as far as the bound allows. This is stage 3 of ZeRO (Rajbhandari et al., 2020), with the places of the
gathers chosen from the graph.

Operations that only rearrange the entries of a weight (`_VIEWS`) are built again from each gather; otherwise they would
keep the first one in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.analysis.placements import FLAT_SHARD, REPLICATED, PlacedOutputs, PlacedTensor
from keras_ddl.cut.analysis.program import Node, Value
from keras_ddl.cut.operations.context import Context
from keras_ddl.cut.values import flat_shards
from keras_ddl.cut.values.local_shapes import no_dependencies

_VIEWS = ("Reshape", "Transpose", "ExpandDims", "Squeeze", "Cast")


@dataclass(eq=False)
class _Gathered:
    """A gathered weight. `users`: the operations that have used it. `views`: its rearrangements."""

    tensor: tf.Tensor
    bytes: int
    users: list[tf.Operation] = field(default_factory=list)
    views: dict[Value, tf.Tensor] = field(default_factory=dict)


class _Source(NamedTuple):
    """The flat shard from which a value is gathered, and for a view the operation that rearranges `of`."""

    shard: Value
    view: Node | None = None


class GatheredWeights:
    """The temporarily gathered weights of one graph.

    Args:
        apply_rules: builds an operation whose operands are not in flat shards.
    """

    def __init__(self, context: Context, apply_rules: Callable[[Node], PlacedOutputs]) -> None:
        self._b, self._apply_rules = context, apply_rules
        self._sources: dict[Value, _Source] = {}
        self._live: dict[int, _Gathered] = {}  # by id of the flat shard; the least recently used first
        self._seen: dict[int, tf.Tensor] = {}  # flat shards that were gathered, by id
        self._needed: set[int] = set()  # ids of the flat shards that the operation being built needs

    def hold(self, value: Value) -> None:
        """Lets this class gather a flat shard, which was read from a weight or computed only from weights."""
        self._sources[value] = _Source(value)

    def hold_outputs(self, node: Node, made: PlacedOutputs) -> None:
        """Holds the results of an operation that are flat shards, if they were computed only from weights."""
        if any(map(self.has, node.inputs)) and not any(map(self._b.depends_on_batch, node.inputs)):
            for value, (_, placement) in zip(node.outputs, made):
                if placement == FLAT_SHARD:
                    self.hold(value)

    def has(self, value: Value) -> bool:
        """Whether this class gathers `value`, or the value that `value` rearranges."""
        return self._b.origin(value) in self._sources

    def make(self, node: Node) -> PlacedOutputs:
        """Builds an operation of gathered weights. COLLECTIVE. Raises: Pending."""
        b = self._b
        held = {each: self._sources[b.origin(each)] for each in node.inputs if self.has(each)}
        self._needed = {self._key(each) for each in held.values()}
        tensors = {each: self._tensor(source, b.origin(each)) for each, source in held.items()}
        with b.placed_as({each: PlacedTensor(tensor, REPLICATED) for each, tensor in tensors.items()}):
            made = self._apply_rules(node)
        used = [self._live[self._key(source)] for source in held.values()]
        if self._is_view(node) and len(held) == 1:
            (source,) = held.values()
            self._sources[node.outputs[0]] = _Source(source.shard, node)
            used[0].views[node.outputs[0]] = made[0][0]
        else:
            for each in used:
                each.users += b.operations_so_far()
        return made

    def make_with(self, value: Value, build: Callable[[tf.Tensor], PlacedOutputs]) -> PlacedOutputs:
        """Returns the result of `build` on the gathered value of a flat shard that does not belong to the program.
        COLLECTIVE."""
        source = _Source(value)
        self._needed = {self._key(source)}
        made = build(self._tensor(source, value))
        self._live[self._key(source)].users += self._b.operations_so_far()
        return made

    def _is_view(self, node: Node) -> bool:
        others = [each for each in node.inputs if not self.has(each)]
        is_constant = all(self._b.placement(each) == REPLICATED for each in others)
        return node.type in _VIEWS and node.is_pure and is_constant and not any(map(self._b.depends_on_batch, others))

    def _key(self, source: _Source) -> int:
        return id(self._b.local(source.shard))

    def _tensor(self, source: _Source, value: Value) -> tf.Tensor:
        """Returns a gathered value; gathers it unless that was done recently."""
        key = self._key(source)
        if key in self._live:
            gathered = self._live.pop(key)
        else:
            gathered = self._gather(source.shard)
        self._live[key] = gathered
        if source.view is None:
            return gathered.tensor
        if value not in gathered.views:
            gathered.views[value] = self._rearranged(source.view)
        return gathered.views[value]

    def _rearranged(self, node: Node) -> tf.Tensor:
        b = self._b
        tensors = [
            self._tensor(self._sources[b.origin(each)], b.origin(each)) if self.has(each) else b.replicated(each)
            for each in node.inputs
        ]
        with no_dependencies():
            result = b.make(node, tensors)[0]
        result.set_shape(node.outputs[0].shape)
        return result

    def _gather(self, value: Value) -> _Gathered:
        b = self._b
        chunk, bytes_ = b.local(value), value.shape.num_elements() * value.dtype.size
        before = self._give_up(bytes_)
        with tf.control_dependencies(None), tf.control_dependencies(before):
            (tensor,) = flat_shards.all_gather(b.collectives, [chunk], [b.layout(value)], b.next_name("weight"))
        b.report.gathered_weight(value, b.node, is_again=id(chunk) in self._seen)
        self._seen[id(chunk)] = chunk
        return _Gathered(tensor, bytes_)

    def _give_up(self, bytes_: int) -> Sequence[tf.Operation]:
        """Makes room for a number of bytes. Returns the operations that must run before the room is free."""
        before: list[tf.Operation] = []
        held = sum(each.bytes for each in self._live.values())
        for key, each in list(self._live.items()):
            if held + bytes_ <= self._b.gathered_bytes:
                break
            if each.users and key not in self._needed:  # otherwise an operation that needs it is yet to be built
                held -= each.bytes
                before += each.users
                del self._live[key]
        return list(dict.fromkeys(before))
