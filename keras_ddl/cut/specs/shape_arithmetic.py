"""Operations on the integers of shapes alone; they have no spec, and are replicated."""

from __future__ import annotations

from keras_ddl.cut.dims import Dim, complete
from keras_ddl.cut.extents import MOST_VALUES, Extents, Numbers, ResultExtents, broadcast, extents, numbers
from keras_ddl.cut.program import Node


@extents("Range")
def _range_extents(known: Extents, node: Node) -> ResultExtents:
    start, limit, step = (known.number(each) if each.dtype.is_integer else None for each in node.inputs)
    return [[limit] if start == 0 and step == 1 and limit is not None and limit.is_extent else None]


@numbers("Range")
def _range(known: Extents, node: Node) -> Numbers | None:
    operands = complete(map(known.constants, node.inputs))
    if operands is None or operands[2] == [0]:
        return None
    entries = range(*(each[0] for each in operands))
    return Numbers(entries) if len(entries) <= MOST_VALUES else None


@numbers("DynamicStitch")
def _stitched(known: Extents, node: Node) -> Numbers | None:
    """How gradients of reductions compute the shape with the reduced axes kept: the later entry counts."""
    count = len(node.inputs) // 2
    result: dict[int, Dim] = {}
    for at, data in zip(node.inputs[:count], node.inputs[count:]):
        places, entries = known.constants(at), known.numbers(data)
        if places is None or entries is None or len(places) != len(entries.entries):
            return None
        result.update(zip(places, entries.entries))
    return Numbers([result[i] for i in range(len(result))]) if sorted(result) == list(range(len(result))) else None


@numbers("ConcatOffset")
def _offsets(known: Extents, node: Node) -> list[Numbers | None] | None:
    """Where the parts of a concatenation begin."""
    axis, shapes = known.constants(node.inputs[0]), complete(map(known.numbers, node.inputs[1:]))
    if axis is None or shapes is None or not 0 <= axis[0] < len(shapes[0].entries):
        return None
    result: list[Numbers | None] = []
    start = Dim(0)
    for each in shapes:
        result.append(Numbers([start if at == axis[0] else 0 for at in range(len(each.entries))]))
        start = start + each.entries[axis[0]]
    return result


@numbers("InvertPermutation")
def _inverted(known: Extents, node: Node) -> Numbers | None:
    order = known.constants(node.inputs[0])
    if order is None or sorted(order) != list(range(len(order))):
        return None
    return Numbers([order.index(i) for i in range(len(order))])


@numbers("BroadcastArgs")
def _broadcast(known: Extents, node: Node) -> Numbers | None:
    shapes = complete(map(known.numbers, node.inputs))
    extents = broadcast([each.entries for each in shapes]) if shapes is not None else None
    entries = complete(extents) if extents is not None else None
    return None if entries is None else Numbers(entries)
