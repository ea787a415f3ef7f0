"""Recognizes gradients of weights among sums: only these may be rounded on their way."""

from __future__ import annotations

from collections.abc import Container

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.program import Node, Value

# As tf.GradientTape and tf.gradients name what they make.
_BACKWARD = ("gradient_tape/", "gradients/")


def is_weight_gradient(value: Value, shapes: Container[tuple[int, ...]]) -> bool:
    """Returns whether a sum over rows is certain to be the gradient of a kernel or the like.

    A float32 of two axes or more that a backward pass made, of the shape of a variable that is trained (`shapes`). What
    is as small as a bias, or a statistic of a batch, stays exact: it is no part of the bytes that count, and an error
    that is made up for in the next step must not be in what belongs to this one.
    """
    if value.dtype != tf.float32 or (value.rank or 0) < 2 or not value.shape.is_fully_defined():
        return False
    return tuple(value.shape.as_list()) in shapes and _is_of_backward(value.node)


def _is_of_backward(node: Node) -> bool:
    if any(each in node.operation.name for each in _BACKWARD):
        return True
    # A weight that is used several times: the tape adds up what each use gives, under a name of its own.
    return node.type == "AddN" and all(_is_of_backward(value.node) for value in node.inputs)
