"""Builds sums of three or more tensors as additions in the order of the program.

TensorFlow's AddN begins with an operand whose memory nothing else uses at that moment, so its rounding depends on which
of its operands' other readers have run. Grappler also merges additions into an AddN. Values that all ranks compute must
be equal in every bit, so additions are built one by one and marked as already seen by Grappler.
"""

from __future__ import annotations

from keras_ddl.compat.tensorflow import create_op, tf
from keras_ddl.cut.analysis.program import Node
from keras_ddl.cut.analysis.variable_ops import MARKED


def is_addition(node: Node) -> bool:
    """Whether an operation adds two tensors of numbers that are rounded."""
    return node.type in ("Add", "AddV2") and _is_rounded(node)


def is_long_sum(node: Node) -> bool:
    """Whether an operation adds up more than two tensors of numbers that are rounded."""
    return node.type == "AddN" and len(node.inputs) > 2 and _is_rounded(node)


def _is_rounded(node: Node) -> bool:
    dtype = node.outputs[0].dtype
    return bool(dtype.is_floating or dtype.is_complex)


def added(tensors: list[tf.Tensor], name: str) -> list[tf.Operation]:
    """Builds a chain of additions; the last one gives the sum."""
    graph, total = tf.compat.v1.get_default_graph(), tensors[0]
    attrs = {"T": tf.compat.v1.AttrValue(type=total.dtype.as_datatype_enum), **MARKED}
    made: list[tf.Operation] = []
    for each in tensors[1:]:
        made.append(create_op(graph, "AddV2", [total, each], [total.dtype], attrs=attrs, name=name))
        total = made[-1].outputs[0]
    return made
