"""Estimates the arithmetic of an operation, to show which share of a step every rank computes in full.

An entry of a result counts as one operation, or two for each pair of factors in a contraction. Open extents count as
FEW_ROWS, and the body of a loop counts once. Only ratios are meaningful.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from keras_ddl.compat import tensorflow as tf_compat
from keras_ddl.compat.tensorflow import tf

FEW_ROWS = 32  # fit's default batch size, assumed where the rows are known only when the step runs
# Operations without arithmetic: they only name or forward values.
_TYPES = (
    "Const Identity IdentityN NoOp Placeholder ReadVariableOp Shape ShapeN Size Rank StopGradient Reshape "
    "ExpandDims Squeeze VarHandleOp PreventGradient"
)
_NOTHING = frozenset(_TYPES.split())
_NO_NUMBERS = (tf.variant, tf.resource, tf.string)


def work_of(operation: tf.Operation) -> float:
    """Returns an estimate of the arithmetic operations of one operation, or of the graphs that it calls."""
    if operation.type in _NOTHING:
        return 0.0
    inner = tf_compat.graphs_of(operation)
    if inner:
        return sum(work_of(each) for graph in inner for each in graph.get_operations())
    entries = float(sum(_entries(each) for each in operation.outputs))
    return entries * _factors(operation)


def _factors(operation: tf.Operation) -> float:
    """Returns the operations for each entry of the result."""
    kind = operation.type
    if kind.startswith(("MatMul", "BatchMatMul")) and len(operation.inputs) == 2:
        transposed = operation.get_attr("transpose_a") if kind == "MatMul" else operation.get_attr("adj_x")
        return 2.0 * _extent(operation.inputs[0], -2 if transposed else -1)
    if kind == "Einsum":
        inputs, _, output = operation.get_attr("equation").decode().partition("->")
        extents: dict[str, float] = {}
        for labels, tensor in zip(inputs.split(","), operation.inputs):
            if tensor.shape.rank == len(labels):
                extents.update((label, _extent(tensor, axis)) for axis, label in enumerate(labels))
        return 2.0 * math.prod(extent for label, extent in extents.items() if label not in output)
    if kind.startswith(("Conv2D", "Conv3D", "DepthwiseConv2d")):
        if "BackpropFilter" in kind:  # each entry of the kernel is multiplied at each position
            return 2.0 * _entries(operation.inputs[2]) / max(1.0, _extent(operation.inputs[2], -1))
        kernel = operation.inputs[1]
        return 2.0 * _entries(kernel) / max(1.0, _extent(kernel, -2 if "BackpropInput" in kind else -1))
    return 1.0


def bytes_of(tensors: Iterable[Any], extent: int = FEW_ROWS) -> int:
    """Returns the bytes of tensors, or of values of a program; an extent that is not known counts as `extent`."""
    known = [each for each in tensors if each.shape.rank is not None and each.dtype not in _NO_NUMBERS]
    return sum(
        math.prod(extent if n is None else n for n in each.shape.as_list()) * int(each.dtype.size) for each in known
    )


def _entries(tensor: Any) -> float:
    """Returns how many entries a tensor has."""
    if tensor.shape.rank is None:
        return 1.0
    return math.prod(_extent(tensor, axis) for axis in range(tensor.shape.rank))


def _extent(tensor: Any, axis: int) -> float:
    if tensor.shape.rank is None or not tensor.shape.rank >= abs(axis):
        return 1.0
    extent = tensor.shape[axis]
    return float(FEW_ROWS if extent is None else extent)
