"""Lists of tensors, which loops read and write: the elements of a cut list are the rank's rows of each element."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.program import Node
from keras_ddl.cut.propagation import Made, propagate
from keras_ddl.cut.registry import rule
from keras_ddl.cut.states import WHOLE, ListOf, Rows, Whole

if TYPE_CHECKING:
    from keras_ddl.cut.builder import Builder


def local_element_shape(b: Any, operand: Any, rows: Rows) -> Any:
    """Returns the shape of a rank's elements, given that of the whole ones; what is left open (-1) stays so."""
    known = b.extents.numbers(operand)
    if operand.rank == 0:
        return b.whole(operand)
    if known is not None:
        entries = list(known.entries)
        if all(each == -1 or each.number is not None for each in entries):
            entries = [b.number(each) for each in entries]
            entries[rows.axis] = -1 if entries[rows.axis] == -1 else b.local_extent(rows)
            return b.as_vector(entries, operand.dtype)
    whole = tf.cast(b.whole(operand), tf.int64)
    local = tf.where(whole < 0, whole, tf.cast(b.local_extent(rows), tf.int64))
    here = tf.equal(tf.range(tf.size(whole)), rows.axis)  # not ==, which compares objects in graphs of TensorFlow 1
    return tf.cast(tf.where(here, local, whole), operand.dtype)


def _state(b: Any, value: Any) -> ListOf | None:
    state = b.state(value)
    return state if isinstance(state, ListOf) else None


@rule("TensorListReserve", "EmptyTensorList", of_whole=True)
def new_list(b: Any, node: Any) -> Any:
    pieces = b.make_whole(node)
    shape, number = node.inputs

    def recipe(state: ListOf) -> Any:
        known, rows = b.extents.numbers(shape), state.element
        if known is None or state.optional or node.attr("element_dtype").name != state.dtype:
            return None
        entries = known.entries
        if not known.is_scalar and (rows.axis >= len(entries) or entries[rows.axis] not in (-1, b.extent(rows))):
            return None
        return b.make(node, [local_element_shape(b, shape, rows), b.whole(number)])[0]

    b.give_recipe(node.outputs[0], recipe)
    return pieces


@rule("TensorListFromTensor", of_whole=True)
def of_whole_tensor(b: Any, node: Any) -> Any:
    pieces = b.make_whole(node)
    value, shape = node.inputs

    def recipe(state: ListOf) -> Any:
        rows = state.element.at(state.element.axis + 1)
        if (
            state.optional
            or value.dtype.name != state.dtype
            or value.rank is None
            or rows.axis >= value.rank
            or not b.fits(value, rows)
        ):
            return None
        return b.make(node, [b.cut(value, rows), local_element_shape(b, shape, state.element)])[0]

    b.give_recipe(node.outputs[0], recipe)
    return pieces


@rule("OptionalNone", of_whole=True)
def nothing(b: Any, node: Any) -> Any:
    pieces = b.make_whole(node)
    b.give_recipe(node.outputs[0], lambda state: pieces[0].tensor if state.optional else None)
    return pieces


@rule("TensorListFromTensor")
def from_tensor(b: Any, node: Any) -> Any:
    value, shape = node.inputs
    rows = b.state(value)
    if not isinstance(rows, Rows) or rows.axis == 0 or not isinstance(b.state(shape), Whole):
        return None
    element = rows.at(rows.axis - 1)
    made = b.make(node, [b.held(value), local_element_shape(b, shape, element)])[0]
    return [(made, ListOf(element, value.dtype.name))]


@rule("TensorListSetItem", "TensorListPushBack")
def put(b: Any, node: Any) -> Any:
    values, item = node.inputs[0], node.inputs[-1]
    state, rows = _state(b, values), b.state(item)
    if state is None:
        if not isinstance(rows, Rows):
            return None
        state = ListOf(rows, item.dtype.name)
    if rows != state.element and not b.fits(item, state.element):
        return None
    held = b.list_of(values, state)
    if held is None:
        return None
    between = [b.whole(each) for each in node.inputs[1:-1]]
    return [(b.make(node, [held, *between, b.cut(item, state.element)])[0], state)]


@rule("TensorListGetItem", "TensorListStack", "TensorListGather")
def get(b: Any, node: Any) -> Any:
    values, shape = node.inputs[0], node.inputs[-1]
    state = _state(b, values)
    if state is None:
        return None
    between = [b.whole(each) for each in node.inputs[1:-1]]
    inputs = [b.held(values), *between, local_element_shape(b, shape, state.element)]
    rows = state.element.at(state.element.axis + (node.type != "TensorListGetItem"))
    if b.dims(node.outputs[0]) is None:
        return None
    return [(b.make(node, inputs)[0], rows)]


@rule("TensorListPopBack")
def pop_back(b: Any, node: Any) -> Any:
    values, shape = node.inputs
    state = _state(b, values)
    if state is None or b.dims(node.outputs[1]) is None:
        return None
    rest, element = b.make(node, [b.held(values), local_element_shape(b, shape, state.element)])
    return [(rest, state), (element, state.element)]


@rule("TensorListLength", "OptionalHasValue")
def length(b: Any, node: Any) -> Any:
    return [(b.make(node, [b.held(node.inputs[0])])[0], WHOLE)]


@rule("TensorListResize")
def resize(b: Any, node: Any) -> Any:
    state = _state(b, node.inputs[0])
    return None if state is None else [(b.make(node, [b.held(node.inputs[0]), b.whole(node.inputs[1])])[0], state)]


@rule("TensorListElementShape")
def element_shape(b: Any, node: Any) -> Any:
    """The element shape that the list of whole elements was declared with."""
    content = b.extents.content(node.inputs[0])
    if content is None or content.declared is None or None in content.declared:
        return None
    return [(b.vector(content.declared, node.outputs[0].dtype), WHOLE)]


@rule("OptionalFromValue")
def optional(b: Any, node: Any) -> Any:
    rows = b.state(node.inputs[0])
    if len(node.inputs) != 1 or not isinstance(rows, Rows):
        return None
    return [(b.make(node, [b.held(node.inputs[0])])[0], ListOf(rows, node.inputs[0].dtype.name, True))]


@rule("OptionalGetValue")
def open_optional(b: Any, node: Any) -> Any:
    state = _state(b, node.inputs[0])
    if state is None or len(node.outputs) != 1 or b.dims(node.outputs[0]) is None:
        return None
    held = b.held(node.inputs[0])
    shape = tf.TensorShape(
        [None if axis == state.element.axis else each for axis, each in enumerate(node.outputs[0].shape.as_list())]
        if node.outputs[0].rank is not None
        else None
    )
    made = tf.raw_ops.OptionalGetValue(optional=held, output_types=[node.outputs[0].dtype], output_shapes=[shape])[0]
    b.ran(made.op)
    return [(made, state.element)]


@rule("AddN", "ZerosLike")
def entry_by_entry(b: Builder, node: Node) -> Made | None:
    """Of lists that are held alike; of tensors as their rows (rows/entrywise.py) say."""
    lists = next((state for state in map(b.state, node.inputs) if isinstance(state, ListOf)), None)
    if lists is None:
        return propagate(b, node)
    held = [b.list_of(each, lists) for each in node.inputs]
    return None if any(each is None for each in held) else [(b.make(node, held)[0], lists)]
