"""Operations on the integers of shapes only; they have no spec and are replicated."""

from __future__ import annotations

import operator
from itertools import zip_longest

from keras_ddl.cut.analysis.dims import ONE, Dim, Uncertain, certain
from keras_ddl.cut.analysis.extents import (
    MOST_VALUES,
    Extents,
    ResultExtents,
    ResultNumbers,
    broadcast_extent,
    extents,
    numbers,
)
from keras_ddl.cut.analysis.program import Node


@extents("Range")
def _range_extents(known: Extents, node: Node) -> ResultExtents:
    start, limit, step = map(known.number, node.inputs)
    return [[limit] if start == 0 and step == 1 and limit.is_extent else None]


@numbers("Range")
def _range(known: Extents, node: Node) -> ResultNumbers:
    start, limit, step = (known.constants(each)[0] for each in node.inputs)
    entries = range(start, limit, step) if step else ()
    if not step or len(entries) > MOST_VALUES:
        raise Uncertain
    return [entries]


@numbers("DynamicStitch")
def _stitched(known: Extents, node: Node) -> ResultNumbers:
    """Merges vectors, as gradients of reductions do to keep the reduced axes in a shape; later entries win."""
    count = len(node.inputs) // 2
    result: dict[int, Dim] = {}
    for at, data in zip(node.inputs[:count], node.inputs[count:]):
        places, entries = known.constants(at), known.numbers(data)
        if len(places) != len(entries):
            raise Uncertain
        result.update(zip(places, entries))
    return [[certain(result.get(i)) for i in range(len(result))]]


@numbers("ConcatOffset")
def _offsets(known: Extents, node: Node) -> ResultNumbers:
    """Returns the positions at which the parts of a concatenation begin."""
    (axis,), shapes = known.constants(node.inputs[0]), [known.numbers(each) for each in node.inputs[1:]]
    if not 0 <= axis < len(shapes[0]):
        raise Uncertain
    result: list[list[Dim | int]] = []
    start = Dim(0)
    for shape in shapes:
        result.append([start if at == axis else 0 for at in range(len(shape))])
        start = start + shape[axis]
    return result


@numbers("InvertPermutation")
def _inverted(known: Extents, node: Node) -> ResultNumbers:
    order = known.constants(node.inputs[0])
    if sorted(order) != list(range(len(order))):
        raise Uncertain
    return [[order.index(i) for i in range(len(order))]]


@numbers("BroadcastArgs")
def _broadcast(known: Extents, node: Node) -> ResultNumbers:
    aligned = zip_longest(*(reversed(known.numbers(each)) for each in node.inputs), fillvalue=ONE)
    return [[certain(broadcast_extent(each)) for each in aligned][::-1]]


@numbers("SelectV2")
def _selected(known: Extents, node: Node) -> ResultNumbers:
    """Returns the entries of one operand, if it is known which one is taken, as for a negative axis."""
    condition = node.inputs[0].source().node
    if condition.type not in _COMPARED or node.inputs[0].rank != 0:
        raise Uncertain
    one, other = (known.number(each) for each in condition.inputs)
    taken = node.inputs[1 if _COMPARED[condition.type](certain(one.number), certain(other.number)) else 2]
    return [known.numbers(taken)]


_COMPARED = {"GreaterEqual": operator.ge, "Greater": operator.gt, "Less": operator.lt, "LessEqual": operator.le}
