"""Variables are replicated.

A variable in which gradients are accumulated between updates may be partial instead: then its handle is, and so is what
is read from it and assigned to it.
"""

from __future__ import annotations

from keras_ddl.cut.context import Context
from keras_ddl.cut.placements import PARTIAL, PlacedOutputs
from keras_ddl.cut.program import Node
from keras_ddl.cut.registry import rule
from keras_ddl.cut.variable_ops import ASSIGNS, READ


@rule(READ)
def read(b: Context, node: Node) -> PlacedOutputs:
    return [(b.make(node, [b.local(node.inputs[0])])[0], PARTIAL)]


@rule(*ASSIGNS)
def assign(b: Context, node: Node) -> PlacedOutputs | None:
    variable, value = node.inputs
    if b.placement(variable) != PARTIAL:
        return None
    b.make(node, [b.local(variable), b.partial(value)])
    return []
