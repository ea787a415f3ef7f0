"""Which axes an operation takes away, as far as that is certain before the step runs."""

from __future__ import annotations

from keras_ddl.cut.dims import ONE
from keras_ddl.cut.extents import Dims, Extents
from keras_ddl.cut.program import Node, Value


def reduced_axes(known: Extents, value: Value) -> tuple[list[int], frozenset[int]] | None:
    """Returns the axes that an operand names to be reduced, and axes that it may name besides, if their extent is 1.

    The gradient of a broadcast names axes along which the operand was repeated. Where both extents are 1 it names the
    axis, too, which changes nothing but the number of axes.
    """
    certain = known.constants(value)
    if certain is not None:
        return certain, frozenset()
    node = value.node
    if node.type != "BroadcastGradientArgs":
        return None
    shapes = [known.numbers(each) for each in node.inputs]
    if any(each is None for each in shapes):
        return None
    rank = max(len(each.entries) for each in shapes)
    own, other = ((ONE,) * (rank - len(each.entries)) + each.entries for each in shapes)
    if value.index == 1:
        own, other = other, own
    axes, perhaps = [], set()
    for axis, (a, b) in enumerate(zip(own, other)):
        if a == 1:
            axes.append(axis)
        elif a.number is None and (a == b or b == 1):
            perhaps.add(axis)
        elif a.number is None:
            return None
    return axes, frozenset(perhaps)


def squeezed_axes(dims: Dims, node: Node) -> list[int] | None:
    """Returns the axes that a Squeeze takes from a tensor of extents `dims`; None if they are not certain."""
    named = [axis % len(dims) for axis in node.attr("squeeze_dims")]
    if named:
        return named
    return None if any(each.number is None for each in dims) else [axis for axis, each in enumerate(dims) if each == 1]
