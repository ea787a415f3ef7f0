"""Variables: every rank has them whole.

A variable in which gradients are accumulated between updates may hold a part of a sum on each rank instead: then its
handle is held as a part, and so is what is read from it and assigned to it.
"""

from __future__ import annotations

from typing import Any

from keras_ddl.cut.context import Context
from keras_ddl.cut.placements import PARTIAL
from keras_ddl.cut.program import Node
from keras_ddl.cut.registry import rule


@rule("ReadVariableOp")
def read(b: Context, node: Node) -> Any:
    return [(b.make(node, [b.local(node.inputs[0])])[0], PARTIAL)]


@rule("AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp")
def assign(b: Context, node: Node) -> Any:
    variable, value = node.inputs
    if b.placement(variable) != PARTIAL:
        return None
    b.make(node, [b.local(variable), b.partial(value)])
    return []
