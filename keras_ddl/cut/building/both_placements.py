"""Makes values available both replicated and sharded, so that neither use needs a collective.

A value that had to be computed replicated is then also sharded. A sharded value that is
cheap, such as a count or a comparison on the way to indices, can be recomputed replicated if its operands are available
replicated.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from keras_ddl.compat import tensorflow as tf_compat
from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.analysis.dims import if_certain
from keras_ddl.cut.analysis.extents import Dims
from keras_ddl.cut.analysis.placements import REPLICATED, PlacedOutputs, PlacedTensor, Sharded
from keras_ddl.cut.analysis.program import Node, Value
from keras_ddl.cut.operations.context import Context
from keras_ddl.cut.values import redistribute
from keras_ddl.cut.values.local_shapes import no_dependencies

_DEEPEST = 64  # up to this many operations are recomputed instead of gathering their result


class BothPlacements:
    """Decides which values of a context are made available in both placements."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._depths: dict[Value, int] = {}

    def recompute_replicated(self, node: Node) -> None:
        """Registers how indices, counts and comparisons are recomputed from replicated operands."""
        context = self._context
        if node.after or tf_compat.is_stateful(node.operation) or any(map(_is_data, node.outputs)):
            return
        depth = 1 + max(map(self._depth, node.inputs), default=0)
        if depth <= _DEEPEST:
            for value in node.outputs:
                self._depths[value] = depth
                context.register_replicator(value, functools.partial(self._recomputed, value))

    def _recomputed(self, value: Value) -> tf.Tensor:
        return self._context.make_replicated(value.node)[value.index].tensor

    def _depth(self, value: Value) -> int:
        """Returns the operations from replicated values to `value`; _DEEPEST or more if there is no such path."""
        context = self._context
        if context.placement(value) == REPLICATED:
            return 0
        return self._depths.get(context.origin(value), 0) if context.has_replicated(value) else _DEEPEST

    def also_sharded(self, node: Node, made: list[PlacedTensor]) -> PlacedOutputs:
        """Shards replicated results with one row for each row of the batch, so each rank continues with its own rows.

        Readers that need the global tensor still use it. Only values computed from the batch's entries are sharded, and
        only if the operation creates an axis of the batch's extent: a replicated operand may have such an axis by
        chance, like a square matrix of weights. Vectors are not sharded: it is cheap to continue with them replicated,
        and results of a shard might have to be gathered. Nothing is sharded in loops, because nothing can be gathered
        there.
        """
        context = self._context
        if context.in_loop or not any(map(context.depends_on_batch, node.inputs)):
            return made
        dims = [if_certain(context.dims, each) for each in node.inputs]
        had_shards = any(isinstance(context.placement(each), Sharded) for each in node.inputs)
        if not had_shards and any(each and _is_matrix(each) and {*context.rows_of_batches} & {*each} for each in dims):
            return made
        # The rows of one batch, or of several in sequence, as in an operand.
        placements = [context.placement(each) for each in node.inputs]
        shards = [Sharded(0, rows=(number,)) for number in range(len(context.batches))]
        shards += [
            Sharded(0, rows=each.rows) for each in placements if isinstance(each, Sharded) and len(each.rows) > 1
        ]
        return [self._sharded(value, each, shards) for value, each in zip(node.outputs, made)]

    def _sharded(self, value: Value, made: PlacedTensor, shards: Sequence[Sharded]) -> PlacedTensor:
        context = self._context
        dims = if_certain(context.dims, value)
        if value.dtype in (tf.variant, tf.resource) or dims is None or not _is_matrix(dims):
            return made
        placement = next((each for each in shards if context.can_shard(value, each)), None)
        if placement is None:
            return made
        with no_dependencies():
            shard = redistribute.shard(context, made.tensor, placement)
        context.cache_replicated(value, made.tensor)
        return PlacedTensor(shard, placement)


def _is_data(value: Value) -> bool:
    return not (value.dtype.is_integer or value.dtype in (tf.bool, tf.string))


def _is_matrix(dims: Dims) -> bool:
    return sum(each != 1 for each in dims) > 1
