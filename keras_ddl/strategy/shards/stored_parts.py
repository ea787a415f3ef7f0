"""Which boxes of the complete tensor this rank stores, for variables that are spread over ranks.

Checkpoints are written and read in these boxes (model_state.py), so that no rank has a complete variable. Variables
that cannot be written in boxes are gathered, as for any other reader (gathered_slots.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from keras_ddl import communicator, ops
from keras_ddl.communicator import Communicator
from keras_ddl.compat.names import plain_name
from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.values.layouts import Box
from keras_ddl.strategy.mesh.laid_out import LaidOutVariable
from keras_ddl.strategy.shards.sharded_slots import ShardedVariable, deferring_restored_values, sharded_variable


def boxes_of(slot: ShardedVariable) -> list[Box] | None:
    """Returns the boxes whose entries this rank stores, in its order; None if its entries are not boxes."""
    layout = slot.share.layout
    is_stored_so = tuple(slot.chunk.shape) == layout.shape_of(slot.share.rank)
    return layout.boxes(slot.share.rank) if is_stored_so else None


def is_written_here(slot: ShardedVariable) -> bool:
    """Whether this rank writes its boxes; of ranks with the same boxes, the first one does."""
    own = [held[0] for held in slot.held_by_all()]
    return own.index(own[communicator.rank()]) == communicator.rank()


def slot_in_parts(variable: Any) -> ShardedVariable | None:
    """Returns the ShardedVariable that a variable has or is, if ranks store boxes of it. Equal on all ranks."""
    slot = sharded_variable(variable)
    return slot if slot is not None and boxes_of(slot) is not None else None


def restore(slot: ShardedVariable, read: Callable[[Sequence[Box]], tf.Tensor], source: str) -> None:
    """Assigns what this rank stores of a variable: its own boxes, and the mirror of another rank's.

    Args:
        read: returns the entries of boxes of the complete tensor, one box after the other.
        source: where the entries come from, equal on all ranks.
    """
    if slot.gathered is not None:
        complete = tuple((0, extent) for extent in slot.shape.as_list())
        slot.assign(tf.reshape(read([complete]), slot.shape))
        return
    for variable, boxes in zip(slot.share.variables, slot.held()):
        variable.assign(tf.reshape(read(boxes), variable.shape))
    if not deferring_restored_values.get():
        slot.note_assignment(np.frombuffer(source.encode(), np.uint8))


def send_along_batch(slots: Iterable[ShardedVariable], data: Communicator) -> None:
    """Sends slices from the ranks of the first data position to those of the others. COLLECTIVE.

    `data`: communicator of the ranks that differ from this one only along the batch axis. Cost: a broadcast of each
    slice.
    """
    for slot in slots:
        if isinstance(slot, LaidOutVariable):
            name = f"keras_ddl/slots/{plain_name(slot.name.partition(':')[0])}/restored"
            with ops.translate_errors():
                slot.chunk.assign(ops.broadcast(slot.chunk.read_value(), name=name, comm=data))
