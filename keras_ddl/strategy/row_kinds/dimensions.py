"""Where the dimension of the rows is after an operation, and what an operation takes along it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from keras_ddl.compat import tensorflow as tf_compat
from keras_ddl.compat.tensorflow import tf


def labels_of(operation: Any, inputs: Sequence[Any]) -> tuple[list[str], str] | None:
    """Returns letters for the dimensions of the factors of a product and of its result, as in an einsum."""
    if operation.type == "Einsum":
        factors, _, result = operation.get_attr("equation").decode().partition("->")
        return None if "." in factors else (factors.split(","), result)
    if "MatMul" not in operation.type or any(each.shape.rank is None for each in inputs):
        return None
    transposed = [
        operation.get_attr(name)
        for name in (("transpose_a", "transpose_b") if operation.type == "MatMul" else ("adj_x", "adj_y"))
    ]
    batch = "abcdefgh"[: max(each.shape.rank for each in inputs) - 2]
    first = batch + ("kx" if transposed[0] else "xk")
    second = batch + ("yk" if transposed[1] else "ky")
    return [label[-each.shape.rank :] for label, each in zip((first, second), inputs)], batch + "xy"


def moved_axis(operation: Any, inputs: Sequence[Any], output: Any, axis: int) -> int | None:
    """Returns where a dimension is after an operation that only arranges; None if that cannot be told."""
    kind = operation.type
    if kind == "Transpose":
        order = tf.get_static_value(inputs[1])
        return None if order is None else [int(each) for each in order].index(axis)
    if kind == "ExpandDims":
        at, rank = tf.get_static_value(inputs[1]), inputs[0].shape.rank
        if at is None or rank is None:
            return None
        return axis + (int(at) % (rank + 1) <= axis)
    if kind == "Squeeze":
        rank = inputs[0].shape.rank
        gone = [each % rank for each in operation.get_attr("squeeze_dims")] if rank else []
        return axis - sum(each < axis for each in gone)
    if kind == "Unpack":
        return None if operation.get_attr("axis") == axis else axis - (operation.get_attr("axis") < axis)
    if kind == "StridedSlice":
        new, shrunk = operation.get_attr("new_axis_mask"), operation.get_attr("shrink_axis_mask")
        if operation.get_attr("ellipsis_mask"):
            return axis if axis == 0 and not (new | shrunk) & 1 else None
        position = source = 0
        while source < axis:
            if not new >> position & 1:
                source += 1
            position += 1
        while new >> position & 1:
            position += 1
        if shrunk >> position & 1:
            return None
        return position - sum(shrunk >> each & 1 for each in range(position))
    if kind == "Reshape":
        return 0 if axis == 0 else None
    return axis


def goes_along(inputs: Sequence[Any], axis: int) -> bool:
    """Whether an operation on inputs[0] goes along `axis`, which its inputs[1] says."""
    axes, rank = tf.get_static_value(inputs[1]), inputs[0].shape.rank
    return axes is None or rank is None or any(int(each) % rank == axis for each in axes.ravel())


def takes_some(operation: Any, inputs: Sequence[Any], axis: int) -> bool:
    """Whether a slice or a gather takes some of the rows rather than all."""
    if operation.type == "GatherV2":
        at = tf.get_static_value(inputs[2])
        return at is None or int(at) == axis
    if operation.type == "Slice":
        begin, extent = tf.get_static_value(inputs[1]), tf.get_static_value(inputs[2])
        return (
            begin is None
            or begin[axis] != 0
            or (extent is not None and extent[axis] not in (-1, inputs[0].shape[axis]))
        )
    if operation.get_attr("ellipsis_mask"):
        return False
    masks = operation.get_attr("begin_mask") & operation.get_attr("end_mask") | operation.get_attr("new_axis_mask")
    strides = tf.get_static_value(inputs[3])
    if axis >= inputs[1].shape.num_elements():
        return False
    return not masks >> axis & 1 or strides is None or strides[axis] != 1


def is_zero(tensor: Any) -> bool:
    value = tf_compat.constant_value(tensor)
    return value is not None and not value.any()
