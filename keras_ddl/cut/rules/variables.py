"""Builds the operations that read and assign variables.

Most variables are replicated. The handle of any other variable has the variable's placement, and values that are read
from it or assigned to it have the same placement. A partial variable accumulates gradients between updates. A sharded
variable is cut along the model axis of a mesh.
"""

from __future__ import annotations

from keras_ddl.compat import tensorflow as tf_compat
from keras_ddl.cut.analysis.dims import certain
from keras_ddl.cut.analysis.placements import REPLICATED, PlacedOutputs, Sharded, has_shards
from keras_ddl.cut.analysis.program import Node
from keras_ddl.cut.analysis.variable_ops import ASSIGNS, READ
from keras_ddl.cut.operations.context import Context
from keras_ddl.cut.operations.registry import rule


@rule(READ)
def read(b: Context, node: Node) -> PlacedOutputs:
    handle = node.inputs[0]
    if b.in_loop and isinstance(b.placement(handle), Sharded):
        return [(b.read_before_loop(handle, node), REPLICATED)]
    return [(b.make(node, [b.local(handle)])[0], b.placement(handle))]


@rule(*ASSIGNS)
def assign(b: Context, node: Node) -> PlacedOutputs | None:
    variable, value = node.inputs
    placement = b.placement(variable)
    if placement == REPLICATED:
        return None
    b.make(node, [b.local(variable), b.redistributed(value, placement)])
    return []


@rule("VariableShape")
def shape(b: Context, node: Node) -> PlacedOutputs | None:
    handle = node.inputs[0]
    if not has_shards(b.placement(handle)):
        return None
    known = certain(tf_compat.variable_shape(handle.tensor))
    return [(b.vector(known.as_list(), node.outputs[0].dtype), REPLICATED)]


@rule("VarIsInitializedOp")
def is_initialized(b: Context, node: Node) -> PlacedOutputs | None:
    return [(b.make(node, [b.local(node.inputs[0])])[0], REPLICATED)]
