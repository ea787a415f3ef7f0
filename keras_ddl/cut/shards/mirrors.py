"""Mirrors: copies on another rank of flat shards or slices that only one rank has, so that they survive its loss.

Before it commits, a step sends the new value of every shard that it writes to the shard's mirror, and the commit writes
both. So a mirror is never older than its shard: the state is "in memory before on disk" (Wang et al., "Gemini", SOSP
2023), at every step. Cost: each rank sends and receives the bytes of its shards once per step.

A new value is also staged, so that a rank whose step fails after others have committed can complete the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.analysis.variable_ops import ASSIGN
from keras_ddl.cut.commit.writes import Writes
from keras_ddl.cut.values.collectives import Collectives
from keras_ddl.cut.values.layouts import Distribution


@dataclass(frozen=True)
class Mirror:
    """One variable in shards, on one rank.

    Attributes:
        shard: handle of the variable with this rank's shard. mirror: handle of the variable with the mirror of another
            rank's shard; None: there is no mirror, because another rank has the same shard.
        layout: which rank has which entries. Rank 0's shard is one of the largest.
    """

    shard: tf.Tensor
    mirror: tf.Tensor | None
    layout: Distribution
    dtype: tf.DType


class Mirrors:
    """The mirrors of a step's shards.

    Rank r's mirror is on rank (r + offset) % size. An offset of 0 means that there are no mirrors.

    Args: collectives: of the axis along which the mirrors are; None: of the axis that `update` names.
    """

    def __init__(self, mirrors: Sequence[Mirror], offset: int, collectives: Collectives | None = None) -> None:
        self._offset, self._collectives = offset, collectives
        self._mirrors = list(mirrors)

    @property
    def shards(self) -> list[tf.Tensor]:
        return [each.shard for each in self._mirrors]

    def update(self, writes: Writes, collectives: Collectives, everything: Callable[[], list[tf.Operation]]) -> None:
        """Builds the operations that give all mirrors their new values. COLLECTIVE.

        everything: returns the operations after which shards that are written before the commit have their values.
        """
        collectives = self._collectives or collectives
        postponed = [each for each in self._mirrors if writes.is_assigned(each.shard)]
        early = [each for each in self._mirrors if writes.is_early(each.shard)]
        self._send(postponed, [writes.value(each.shard, each.dtype) for each in postponed], writes, collectives, "")
        if early:
            with tf.control_dependencies(None), tf.control_dependencies(everything()):
                read = [tf.raw_ops.ReadVariableOp(resource=each.shard, dtype=each.dtype) for each in early]
            self._send(early, read, writes, collectives, "early_")
        writes.snapshots.end_stage()

    def _send(
        self,
        mirrors: Sequence[Mirror],
        values: Sequence[tf.Tensor],
        writes: Writes,
        collectives: Collectives,
        prefix: str,
    ) -> None:
        for each, value in zip(mirrors, values):
            writes.snapshots.stage(each.shard, value)
        values = [value for each, value in zip(mirrors, values) if each.mirror is not None]
        mirrors = [each for each in mirrors if each.mirror is not None]
        if not self._offset:
            return
        rank, size = collectives.rank, collectives.size
        source = (rank - self._offset) % size
        sizes = [math.prod(each.layout.shape_of(0)) * each.dtype.size for each in mirrors]  # equal on all ranks
        buckets = collectives.buckets(sizes, [each.dtype.name for each in mirrors]) if mirrors else []
        with tf.control_dependencies(None):
            for number, bucket in enumerate(buckets):
                own = [tf.reshape(values[i], [-1]) for i in bucket]
                sent = own[0] if len(own) == 1 else tf.concat(own, axis=0)
                received = collectives.shift(sent, self._offset, f"{prefix}mirrors_{number}")
                shapes = [mirrors[i].layout.shape_of(source) for i in bucket]
                counts = [math.prod(shape) for shape in shapes]
                received.set_shape([sum(counts)])
                parts = [received] if len(bucket) == 1 else tf.split(received, counts)
                for i, part, shape in zip(bucket, parts, shapes):
                    value = tf.reshape(part, shape)
                    writes.assign(ASSIGN, mirrors[i].mirror, value)
                    writes.snapshots.stage(mirrors[i].mirror, value)
                writes.report.mirrored(sum(sizes[i] for i in bucket), len(bucket))
