"""Replicates gradients that are cut along the model axis although their variables are not.

For example, a layout may name a kernel but not its bias.

Such a gradient is replicated once, before an optimizer computes with it. Otherwise each result of the optimizer would
have to be replicated. Small gradients, such as those of biases, are summed in the bucket of the step's sums: a shard
with zeros around it is a part of a sum.
"""

from __future__ import annotations

import functools

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.analysis.dims import certain
from keras_ddl.cut.analysis.placements import PARTIAL, REPLICATED, PlacedOutputs, Sharded
from keras_ddl.cut.analysis.program import Node, Value
from keras_ddl.cut.operations.context import Context
from keras_ddl.cut.operations.factors import Kind, kind_of
from keras_ddl.cut.shards.shard_plan import values_towards
from keras_ddl.cut.values.collectives import COMBINED_DTYPES

_REASON = "gradients of a variable that is not cut"
_SMALL = 1 << 16  # up to this many bytes, sending twice as much in another collective is faster


class ReplicatedUpdates:
    """Builds operations with cut operands that lead, entry by entry, to assignments of replicated variables."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._parts: dict[Value, Value] = {}  # parts of a sum, by the value that the sum replicates

    def make(self, node: Node) -> PlacedOutputs | None:
        """Returns the outputs of an operation that leads to such an assignment; None for others. Raises: Pending."""
        context = self._context
        if kind_of(node) is not Kind.ENTRYWISE or context.in_loop:
            return None
        sharded = [each for each in node.inputs if isinstance(context.placement(each), Sharded)]
        if not sharded or self._towards.isdisjoint(node.outputs):
            return None
        small = [context.origin(each) for each in sharded if _is_small(each) and not context.has_replicated(each)]
        for value in small:
            if value not in self._parts:
                tensor = self._padded(value)
                self._parts[value] = context.new_value(value.node, tensor, tensor, PARTIAL)
        for value, total in zip(small, context.all_replicated([self._parts[each] for each in small])):
            context.cache_replicated(value, total)
        context.report.intends_gather(node, _REASON)
        return context.make_replicated(node)

    @functools.cached_property
    def _towards(self) -> set[Value]:
        # A variable's handle is an argument, so it is placed before anything that is assigned to it.
        context = self._context
        return values_towards(context.program, lambda handle: context.placement(handle.source()) == REPLICATED)

    def _padded(self, value: Value) -> tf.Tensor:
        """Returns this rank's shard, with zeros in place of the other ranks' shards."""
        context, placement = self._context, self._context.placement(value)
        assert isinstance(placement, Sharded)
        extents = [certain(each.number) for each in context.dims(value)]
        axis, blocks, unit = placement.axis, certain(placement.blocks.number), certain(placement.unit.number)
        seen = tf.reshape(context.local(value), [*extents[:axis], blocks, unit, *extents[axis + 1 :]])
        before, after = unit * context.batch.offset, unit * (context.batch.total - context.batch.offset - 1)
        paddings = [[before, after] if i == axis + 1 else [0, 0] for i in range(len(extents) + 1)]
        return tf.reshape(tf.pad(seen, paddings), extents)


def _is_small(value: Value) -> bool:
    return bool(
        value.dtype in COMBINED_DTYPES
        and value.dtype.is_floating
        and value.shape.is_fully_defined()
        and value.shape.num_elements() * value.dtype.size <= _SMALL
    )
