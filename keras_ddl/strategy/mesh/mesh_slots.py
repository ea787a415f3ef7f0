"""Optimizer slots in shards on a mesh: Strategy(layout=..., sharding="optimizer").

If a layout cuts a weight, its slots are cut along the model axis in the same way, and the data ranks of a model
position hold flat shards of the slice. The step is cut accordingly: along the model axis the slot is a variable with a
slice, which has no memory of its own, and along the batch this variable is in shards (cut/shards/sharding.py).
"""

from __future__ import annotations

from keras_ddl.compat.context import Setting
from keras_ddl.compat.tensorflow import UninitializedVariable, tf
from keras_ddl.cut import LocalPart, MeshLayout
from keras_ddl.strategy.first_values import FirstValue
from keras_ddl.strategy.job import Job
from keras_ddl.strategy.shards.sharded_slots import ShardedVariable, Share

making_in_shards = Setting("slot_in_shards", False)  # whether the slot that an optimizer makes is to be in shards


class MeshSlot(ShardedVariable):
    """A slot; each data rank of a model position has a flat shard of its slice.

    Attributes: slice_handle: handle of a variable without value that stands for the slice in the cut along the model
        axis.
    """

    def __init__(self, value: FirstValue, name: str, job: Job, axis: int | None) -> None:
        self._axis = axis
        super().__init__(value, name, job, lambda: value)
        self._slice = None
        if axis is not None:
            self._slice = UninitializedVariable(
                trainable=False, shape=self.layout.slices.shape_of_slice, dtype=self.dtype, name="slice"
            )

    @property
    def slice_handle(self) -> tf.Tensor:
        return self.handle if self._slice is None else self._slice.handle

    def share_of(self, value: tf.Tensor | FirstValue, job: Job) -> Share:
        mesh = job.mesh
        assert mesh is not None
        layout = MeshLayout(tuple(value.shape.as_list()), self._axis, mesh.data.size, mesh.model.size)
        with tf.device(job.device):
            shape = [layout.chunk(job.rank)[1]]
            chunk = UninitializedVariable(trainable=False, shape=shape, dtype=value.dtype, name="chunk")
            share = Share(layout, job.rank, 0, chunk, None)
            if not isinstance(value, FirstValue):
                share.assign(value)
            elif value.is_constant or layout.slices is None:
                chunk.assign(value.share(layout.flat.runs(mesh.data.rank), shape))
            else:
                slice_ = value.share(layout.slices.runs(mesh.model.rank), layout.flat.shape)
                chunk.assign(layout.flat.cut(slice_, mesh.data.rank))
        return share

    def local_part(self) -> LocalPart:
        """Returns what this rank has of the slot, for the cut along the model axis."""
        slices = self.layout.slices
        return LocalPart(self.handle) if slices is None else LocalPart(self.slice_handle, slices.placement)
