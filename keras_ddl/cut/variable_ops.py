"""Types of operations on variables."""

from __future__ import annotations

READ = "ReadVariableOp"
ASSIGN, ASSIGN_ADD, ASSIGN_SUB = ASSIGNS = ("AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp")
# Rows added to those of a variable, subtracted from them, put in their place.
SCATTER_ADD, SCATTER_SUB, SCATTER_UPDATE = "ResourceScatterAdd", "ResourceScatterSub", "ResourceScatterUpdate"
_OTHERS = ("ResourceScatterMul", "ResourceScatterDiv", "ResourceScatterMin", "ResourceScatterMax")
SCATTERS = (SCATTER_ADD, SCATTER_SUB, SCATTER_UPDATE, *_OTHERS)
