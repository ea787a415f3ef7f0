"""Lists of tensors, which loops read and write: the elements of a cut list are the rank's rows of each element."""

from __future__ import annotations

from typing import Any

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.context import Context
from keras_ddl.cut.placements import REPLICATED, Made, Replicated, Sharded, TensorList
from keras_ddl.cut.program import Node
from keras_ddl.cut.propagation import propagate
from keras_ddl.cut.registry import rule


def local_element_shape(b: Context, operand: Any, rows: Sharded) -> Any:
    """Returns the shape of a rank's elements, given that of the whole ones; what is left open (-1) stays so."""
    known = b.extents.numbers(operand)
    if operand.rank == 0:
        return b.replicated(operand)
    if known is not None:
        entries = list(known.entries)
        if all(each == -1 or each.number is not None for each in entries):
            entries = [b.number(each) for each in entries]
            entries[rows.axis] = -1 if entries[rows.axis] == -1 else b.local_extent(rows)
            return b.vector(entries, operand.dtype)
    whole = tf.cast(b.replicated(operand), tf.int64)
    local = tf.where(whole < 0, whole, tf.cast(b.local_extent(rows), tf.int64))
    here = tf.equal(tf.range(tf.size(whole)), rows.axis)  # not ==, which compares objects in graphs of TensorFlow 1
    return tf.cast(tf.where(here, local, whole), operand.dtype)


def _list_placement(b: Context, value: Any) -> TensorList | None:
    placement = b.placement(value)
    return placement if isinstance(placement, TensorList) else None


@rule("TensorListReserve", "EmptyTensorList", of_replicated=True)
def new_list(b: Context, node: Node) -> Any:
    placed = b.make_replicated(node)
    shape, number = node.inputs

    def recipe(placement: TensorList) -> Any:
        known, rows = b.extents.numbers(shape), placement.element
        if known is None or placement.optional or node.attr("element_dtype").name != placement.dtype:
            return None
        entries = known.entries
        if not known.is_scalar and (rows.axis >= len(entries) or entries[rows.axis] not in (-1, b.extent(rows))):
            return None
        return b.make(node, [local_element_shape(b, shape, rows), b.replicated(number)])[0]

    b.register_materializer(node.outputs[0], recipe)
    return placed


@rule("TensorListFromTensor", of_replicated=True)
def of_whole_tensor(b: Context, node: Node) -> Any:
    placed = b.make_replicated(node)
    value, shape = node.inputs

    def recipe(placement: TensorList) -> Any:
        rows = placement.element.at(placement.element.axis + 1)
        if (
            placement.optional
            or value.dtype.name != placement.dtype
            or value.rank is None
            or rows.axis >= value.rank
            or not b.can_shard(value, rows)
        ):
            return None
        return b.make(node, [b.sharded(value, rows), local_element_shape(b, shape, placement.element)])[0]

    b.register_materializer(node.outputs[0], recipe)
    return placed


@rule("OptionalNone", of_replicated=True)
def nothing(b: Context, node: Node) -> Any:
    placed = b.make_replicated(node)
    b.register_materializer(node.outputs[0], lambda placement: placed[0].tensor if placement.optional else None)
    return placed


@rule("TensorListFromTensor")
def from_tensor(b: Context, node: Node) -> Any:
    value, shape = node.inputs
    rows = b.placement(value)
    if not isinstance(rows, Sharded) or rows.axis == 0 or not isinstance(b.placement(shape), Replicated):
        return None
    element = rows.at(rows.axis - 1)
    made = b.make(node, [b.local(value), local_element_shape(b, shape, element)])[0]
    return [(made, TensorList(element, value.dtype.name))]


@rule("TensorListSetItem", "TensorListPushBack")
def put(b: Context, node: Node) -> Any:
    values, item = node.inputs[0], node.inputs[-1]
    placement, rows = _list_placement(b, values), b.placement(item)
    if placement is None:
        if not isinstance(rows, Sharded):
            return None
        placement = TensorList(rows, item.dtype.name)
    if rows != placement.element and not b.can_shard(item, placement.element):
        return None
    held = b.tensor_list(values, placement)
    if held is None:
        return None
    between = [b.replicated(each) for each in node.inputs[1:-1]]
    return [(b.make(node, [held, *between, b.sharded(item, placement.element)])[0], placement)]


@rule("TensorListGetItem", "TensorListStack", "TensorListGather")
def get(b: Context, node: Node) -> Any:
    values, shape = node.inputs[0], node.inputs[-1]
    placement = _list_placement(b, values)
    if placement is None:
        return None
    between = [b.replicated(each) for each in node.inputs[1:-1]]
    inputs = [b.local(values), *between, local_element_shape(b, shape, placement.element)]
    rows = placement.element.at(placement.element.axis + (node.type != "TensorListGetItem"))
    if b.dims(node.outputs[0]) is None:
        return None
    return [(b.make(node, inputs)[0], rows)]


@rule("TensorListPopBack")
def pop_back(b: Context, node: Node) -> Any:
    values, shape = node.inputs
    placement = _list_placement(b, values)
    if placement is None or b.dims(node.outputs[1]) is None:
        return None
    rest, element = b.make(node, [b.local(values), local_element_shape(b, shape, placement.element)])
    return [(rest, placement), (element, placement.element)]


@rule("TensorListLength", "OptionalHasValue")
def length(b: Context, node: Node) -> Any:
    return [(b.make(node, [b.local(node.inputs[0])])[0], REPLICATED)]


@rule("TensorListResize")
def resize(b: Context, node: Node) -> Any:
    placement = _list_placement(b, node.inputs[0])
    return (
        None
        if placement is None
        else [(b.make(node, [b.local(node.inputs[0]), b.replicated(node.inputs[1])])[0], placement)]
    )


@rule("TensorListElementShape")
def element_shape(b: Context, node: Node) -> Any:
    """The element shape that the list of whole elements was declared with."""
    content = b.extents.content(node.inputs[0])
    if content is None or content.declared is None or None in content.declared:
        return None
    return [(b.vector(content.declared, node.outputs[0].dtype), REPLICATED)]


@rule("OptionalFromValue")
def optional(b: Context, node: Node) -> Any:
    rows = b.placement(node.inputs[0])
    if len(node.inputs) != 1 or not isinstance(rows, Sharded):
        return None
    return [(b.make(node, [b.local(node.inputs[0])])[0], TensorList(rows, node.inputs[0].dtype.name, True))]


@rule("OptionalGetValue")
def open_optional(b: Context, node: Node) -> Any:
    placement = _list_placement(b, node.inputs[0])
    if placement is None or len(node.outputs) != 1 or b.dims(node.outputs[0]) is None:
        return None
    held = b.local(node.inputs[0])
    shape = tf.TensorShape(
        [None if axis == placement.element.axis else each for axis, each in enumerate(node.outputs[0].shape.as_list())]
        if node.outputs[0].rank is not None
        else None
    )
    made = tf.raw_ops.OptionalGetValue(optional=held, output_types=[node.outputs[0].dtype], output_shapes=[shape])[0]
    b.ran(made.op)
    return [(made, placement.element)]


@rule("AddN", "ZerosLike")
def entry_by_entry(b: Context, node: Node) -> Made | None:
    """Of lists that are held alike; of tensors as their rows (rows/entrywise.py) say."""
    lists = next((placement for placement in map(b.placement, node.inputs) if isinstance(placement, TensorList)), None)
    if lists is None:
        return propagate(b, node)
    held = [b.tensor_list(each, lists) for each in node.inputs]
    return None if any(each is None for each in held) else [(b.make(node, held)[0], lists)]
