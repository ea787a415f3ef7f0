"""Collectives along the model axis of a mesh, in a program that is then cut along the batch.

These collectives compute entry by entry or concatenate ranks' tensors, so values that are sharded or partial along the
axis of this cut keep their placement. Along the earlier axis the ranks' tensors have equal shapes.
"""

from __future__ import annotations

from keras_ddl.cut.analysis.dims import Dim, if_certain
from keras_ddl.cut.analysis.placements import REPLICATED, Partial, PlacedOutputs, Placement, Sharded
from keras_ddl.cut.analysis.program import Node, Value
from keras_ddl.cut.operations.context import Context
from keras_ddl.cut.values.collectives import GATHER


def make(context: Context, node: Node, kind: str) -> PlacedOutputs:
    """Builds a collective of the earlier axis. Raises: Pending. `kind`: as `Collectives.kind_of` returns it."""
    placements = [_kept(context.placement(each), kind) for each in node.inputs]
    context.all_replicated([each for each, placement in zip(node.inputs, placements) if placement == REPLICATED])
    tensors = [context.redistributed(each, placement) for each, placement in zip(node.inputs, placements)]
    made = context.make(node, tensors)
    if kind == GATHER:
        result = _gathered(context, node, placements[0])
        made[0].set_shape(context.static_local_shape(node.outputs[0].shape, result))
        return [(tensor, result if i == 0 else REPLICATED) for i, tensor in enumerate(made)]
    for value, output, tensor, local in zip(node.inputs, node.outputs, made, tensors):
        tensor.set_shape(local.shape)
        _set_dims(context, output, if_certain(context.dims, value))
    return list(zip(made, placements))


def _kept(placement: Placement, kind: str) -> Placement:
    """Returns the placement of an operand, and of the result, when the operand is combined along the earlier axis."""
    if placement == REPLICATED or isinstance(placement, Sharded):
        return placement
    # Parts of a sum stay parts when they are summed or concatenated.
    is_part = isinstance(placement, Partial) and kind in (placement.op, GATHER)
    return placement if is_part else REPLICATED


def _gathered(context: Context, node: Node, placement: Placement) -> Placement:
    """Returns the placement of tensors that are concatenated along axis 0."""
    assert context.earlier is not None
    value, size = node.inputs[0], context.earlier.size
    dims = if_certain(context.dims, value)
    _set_dims(context, node.outputs[0], (dims[0] * size, *dims[1:]) if dims else None)
    if isinstance(placement, Sharded) and placement.axis == 0:
        return Sharded(0, placement.blocks * size, placement.unit)
    return placement


def _set_dims(context: Context, output: Value, dims: tuple[Dim, ...] | None) -> None:
    if dims is not None:
        context.extents.named[output.key] = output
        context.extents.set_dims(output, dims)
