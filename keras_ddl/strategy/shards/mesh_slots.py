"""Optimizer slots in shards on a mesh: Strategy(layout=..., sharding="optimizer").

If a layout splits a weight, its slots are split along the model axis in the same way, and the data ranks of a model
position hold flat shards of the slice. The step is cut accordingly: along the model axis the slot is a variable for the
slice, which has no memory of its own, and along the batch this variable is in shards (cut/shards/sharding.py). If a job
continues with one data rank, that rank holds the slice; with one model rank, data ranks hold flat shards of the slot.
"""

from __future__ import annotations

from typing import Any

from keras_ddl.compat.context import Setting
from keras_ddl.compat.tensorflow import UninitializedVariable
from keras_ddl.cut import LocalPart, MeshLayout, Slices
from keras_ddl.cut.values.layouts import Distribution, Layout
from keras_ddl.state.placements import MeshPlace, Place
from keras_ddl.strategy.job import Job
from keras_ddl.strategy.shards.sharded_slots import ShardedVariable, Share
from keras_ddl.strategy.variables.first_values import FirstValue

making_in_shards = Setting("slot_in_shards", False)  # whether the slot that an optimizer is making goes into shards


class MeshSlot(ShardedVariable):
    """A slot of a weight that a layout splits. Each data rank of a model position has a flat shard of its slice."""

    def __init__(self, value: FirstValue, name: str, job: Job, axis: int) -> None:
        self.axis: int = axis
        self._slice: Any = None  # a variable without a value that stands for the slice in the cut along the model axis
        super().__init__(value, name, job, lambda: value)

    def shared_at(self, place: MeshPlace) -> tuple[Distribution, Place]:
        (batch, model), shape = place, tuple(self.shape.as_list())
        if model.size == 1:
            return Layout(shape, batch.size), batch
        if batch.size == 1:
            return Slices(shape, model.size, self.axis), model
        number, offset = batch.number * model.size + model.number, batch.offset * model.size
        layout = MeshLayout(shape, self.axis, batch.size, model.size)
        return layout, Place(number, layout.size, offset)

    def _store(self, share: Share) -> None:
        super()._store(share)
        layout, self._slice = share.layout, None
        if isinstance(layout, MeshLayout):
            self._slice = UninitializedVariable(
                trainable=False, shape=layout.slices.shape_of_slice, dtype=self.dtype, name="slice"
            )

    def local_part(self) -> LocalPart:
        """Returns this rank's part of the slot, for the cut along the model axis."""
        if self._slice is None:
            return LocalPart(self.chunk.handle, self.layout.placement)
        return LocalPart(self._slice.handle, self.layout.slices.placement)
