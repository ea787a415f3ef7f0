"""Integers that operations on shapes give, of those they are given; imported for what it registers in extents.py."""

from __future__ import annotations

from collections.abc import Callable

from keras_ddl.cut.dims import Dim, product
from keras_ddl.cut.extents import MOST_VALUES, Extents, Numbers, broadcast, numbers
from keras_ddl.cut.program import Node


@numbers("Identity", "Cast", "StopGradient", "PreventGradient", "Squeeze", "ExpandDims", "Reshape", "EnsureShape")
def _same(known: Extents, node: Node) -> Numbers | None:
    found = known.numbers(node.inputs[0])
    if found is None and node.type == "Reshape" and node.inputs[0].dtype.is_integer:
        constant = node.inputs[0].constant()
        found = None if constant is None or constant.size > MOST_VALUES else Numbers(constant.ravel().tolist())
    if found is None or not node.inputs[0].dtype.is_integer:
        return None
    if node.outputs[0].rank not in (0, 1):
        return None
    return Numbers(found.entries, node.outputs[0].rank == 0)


@numbers("Shape", "ShapeN")
def _shape(known: Extents, node: Node) -> list[Numbers | None]:
    dims = [known.dims(each) for each in node.inputs]
    return [None if each is None else Numbers(each) for each in dims]


@numbers("Size")
def _size(known: Extents, node: Node) -> Numbers | None:
    size = known.size(node.inputs[0])
    return None if size is None else Numbers([size], True)


@numbers("Pack")
def _pack(known: Extents, node: Node) -> Numbers | None:
    entries = [known.number(each) if each.rank == 0 else None for each in node.inputs]
    return None if any(each is None for each in entries) else Numbers(entries)


@numbers("ConcatV2")
def _concat(known: Extents, node: Node) -> Numbers | None:
    parts = [known.numbers(each) for each in node.inputs[:-1]]
    return None if any(each is None for each in parts) else Numbers([e for each in parts for e in each.entries])


@numbers("Unpack")
def _unpack(known: Extents, node: Node) -> list[Numbers | None] | None:
    found = known.numbers(node.inputs[0])
    return None if found is None else [Numbers([each], True) for each in found.entries]


@numbers("Prod")
def _prod(known: Extents, node: Node) -> Numbers | None:
    found = known.numbers(node.inputs[0])
    if found is None or found.is_scalar or known.constants(node.inputs[1]) not in ([0], [-1]):
        return None
    return Numbers([product(found.entries)], node.outputs[0].rank == 0)


def _of_two(apply: Callable[[Dim, Dim], Dim]) -> Callable[[Extents, Node], Numbers | None]:
    def rule(known: Extents, node: Node) -> Numbers | None:
        a, b = (known.numbers(each) for each in node.inputs)
        if a is None or b is None:
            return None
        length = max(len(a.entries), len(b.entries))
        if {len(a.entries), len(b.entries)} - {1, length}:
            return None
        pairs = [(each.entries * length)[:length] if len(each.entries) == 1 else each.entries for each in (a, b)]
        return Numbers([apply(one, other) for one, other in zip(*pairs)], node.outputs[0].rank == 0)

    return rule


numbers("Mul")(_of_two(lambda a, b: a * b))
numbers("Add", "AddV2")(_of_two(lambda a, b: a + b))
numbers("Sub")(_of_two(lambda a, b: a - b))
numbers("Maximum")(_of_two(lambda a, b: a.larger_of(b)))
numbers("Minimum")(_of_two(lambda a, b: a.smaller_of(b)))


@numbers("FloorDiv")
def _floor_div(known: Extents, node: Node) -> Numbers | None:
    b = known.numbers(node.inputs[1])
    if b is None or any(each == 0 for each in b.entries):
        return None
    return _of_two(lambda one, other: one.floor_divided_by(other))(known, node)


@numbers("FloorMod")
def _floor_mod(known: Extents, node: Node) -> Numbers | None:
    a, b = (known.constants(each) for each in node.inputs)
    if a is None or b is None or len(b) != 1 or b[0] == 0:
        return None
    return Numbers([each % b[0] for each in a], node.outputs[0].rank == 0)


@numbers("Range")
def _counted(known: Extents, node: Node) -> Numbers | None:
    found = [known.constants(each) for each in node.inputs]
    if any(each is None for each in found) or found[2] == [0]:
        return None
    entries = range(*(each[0] for each in found))
    return Numbers(entries) if len(entries) <= MOST_VALUES else None


@numbers("Fill")
def _repeated(known: Extents, node: Node) -> Numbers | None:
    length, entry = known.constants(node.inputs[0]), known.number(node.inputs[1])
    if entry is None or length is None or len(length) != 1 or length[0] > MOST_VALUES:
        return None
    return Numbers([entry] * length[0])


@numbers("DynamicStitch")
def _stitched(known: Extents, node: Node) -> Numbers | None:
    """How gradients of reductions make the shape with the reduced axes kept: the later entry counts."""
    count = len(node.inputs) // 2
    found: dict[int, Dim] = {}
    for at, data in zip(node.inputs[:count], node.inputs[count:]):
        places, entries = known.constants(at), known.numbers(data)
        if places is None or entries is None or len(places) != len(entries.entries):
            return None
        found.update(zip(places, entries.entries))
    if sorted(found) != list(range(len(found))):
        return None
    return Numbers([found[i] for i in range(len(found))])


@numbers("GatherV2")
def _gather(known: Extents, node: Node) -> Numbers | None:
    found, at = known.numbers(node.inputs[0]), known.constants(node.inputs[1])
    if found is None or at is None or found.is_scalar or any(not 0 <= i < len(found.entries) for i in at):
        return None
    return Numbers([found.entries[i] for i in at], node.outputs[0].rank == 0)


@numbers("Slice")
def _slice(known: Extents, node: Node) -> Numbers | None:
    found, begin, size = known.numbers(node.inputs[0]), known.constants(node.inputs[1]), known.constants(node.inputs[2])
    if found is None or begin is None or size is None or found.is_scalar:
        return None
    end = len(found.entries) if size[0] == -1 else begin[0] + size[0]
    return Numbers(found.entries[begin[0] : end])


@numbers("StridedSlice")
def _strided_slice(known: Extents, node: Node) -> Numbers | None:
    found = known.numbers(node.inputs[0])
    if found is None or found.is_scalar or node.attr("new_axis_mask") or node.attr("ellipsis_mask"):
        return None
    begin, end, stride = (known.constants(each) for each in node.inputs[1:])
    if begin is None or stride is None or len(begin) != 1:
        return None
    if node.attr("shrink_axis_mask"):
        at = begin[0]
        return Numbers([found.entries[at]], True) if -len(found.entries) <= at < len(found.entries) else None
    if end is None and not node.attr("end_mask"):
        return None
    first = None if node.attr("begin_mask") else begin[0]
    last = None if node.attr("end_mask") else end[0]
    return Numbers(found.entries[slice(first, last, stride[0])])


@numbers("ConcatOffset")
def _offsets(known: Extents, node: Node) -> list[Numbers | None] | None:
    """Where the parts of a concatenation begin."""
    axis, shapes = known.constants(node.inputs[0]), [known.numbers(each) for each in node.inputs[1:]]
    if axis is None or any(each is None for each in shapes) or not 0 <= axis[0] < len(shapes[0].entries):
        return None
    found: list[Numbers | None] = []
    start = Dim(0)
    for each in shapes:
        found.append(Numbers([start if at == axis[0] else Dim(0) for at in range(len(each.entries))]))
        start = start + each.entries[axis[0]]
    return found


@numbers("InvertPermutation")
def _inverted(known: Extents, node: Node) -> Numbers | None:
    order = known.constants(node.inputs[0])
    if order is None or sorted(order) != list(range(len(order))):
        return None
    return Numbers([order.index(i) for i in range(len(order))])


@numbers("BroadcastArgs")
def _broadcast_args(known: Extents, node: Node) -> Numbers | None:
    shapes = [known.numbers(each) for each in node.inputs]
    if any(each is None for each in shapes):
        return None
    found = broadcast([each.entries for each in shapes])
    return None if found is None or any(each is None for each in found) else Numbers(found)
