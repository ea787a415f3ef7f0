"""Variables: every rank has them whole.

A variable in which gradients are accumulated between updates may hold a part of a sum on each rank instead: then its
handle is held as a part, and so is what is read from it and assigned to it.
"""

from __future__ import annotations

from typing import Any

from keras_ddl.cut.registry import rule
from keras_ddl.cut.states import PARTIAL


@rule("ReadVariableOp")
def read(b: Any, node: Any) -> Any:
    return [(b.make(node, [b.held(node.inputs[0])])[0], PARTIAL)]


@rule("AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp")
def assign(b: Any, node: Any) -> Any:
    variable, value = node.inputs
    if b.state(variable) != PARTIAL:
        return None
    b.make(node, [b.held(variable), b.part(value)])
    return []
