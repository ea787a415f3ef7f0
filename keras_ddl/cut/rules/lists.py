"""Lists of tensors, which loops read and write: elements of a sharded list are the rank's shards of each element."""

from __future__ import annotations

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.contents import NONE_YET, Content, Entries, joined
from keras_ddl.cut.context import Context
from keras_ddl.cut.dims import complete
from keras_ddl.cut.extents import Extents, Numbers, ResultExtents, contents, extents, numbers
from keras_ddl.cut.local_shapes import Scalar
from keras_ddl.cut.placements import REPLICATED, Made, Placement, Replicated, Sharded, TensorList
from keras_ddl.cut.program import Node, Value
from keras_ddl.cut.propagation import propagate
from keras_ddl.cut.registry import rule


def _local_element_shape(b: Context, operand: Value, element: Sharded) -> tf.Tensor:
    """Returns the shape of a rank's elements from that of the global ones; what is left open (-1) stays so."""
    if operand.rank == 0:
        return b.replicated(operand)
    known = b.extents.numbers(operand)
    extents = complete(each.number for each in known.entries) if known is not None else None
    if extents is not None:
        entries: list[Scalar] = [*extents]
        entries[element.axis] = -1 if entries[element.axis] == -1 else b.local_extent(element)
        return b.vector(entries, operand.dtype)
    shape = tf.cast(b.replicated(operand), tf.int64)
    local = tf.where(shape < 0, shape, tf.cast(b.local_extent(element), tf.int64))
    here = tf.equal(tf.range(tf.size(shape)), element.axis)  # not ==, which compares objects in graphs of TensorFlow 1
    return tf.cast(tf.where(here, local, shape), operand.dtype)


def _list_placement(b: Context, value: Value) -> TensorList | None:
    placement = b.placement(value)
    return placement if isinstance(placement, TensorList) else None


# ---- new lists


@rule("TensorListReserve", "EmptyTensorList", of_replicated=True)
def new_list(b: Context, node: Node) -> Made:
    made = b.make_replicated(node)
    shape, number = node.inputs

    def materializer(placement: Placement) -> tf.Tensor | None:
        known = b.extents.numbers(shape)
        if known is None or not isinstance(placement, TensorList) or placement.optional:
            return None
        if node.attr("element_dtype", tf.DType).name != placement.dtype:
            return None
        entries, element = known.entries, placement.element
        if not known.is_scalar and (
            element.axis >= len(entries) or entries[element.axis] not in (-1, b.extent(element))
        ):
            return None
        return b.make(node, [_local_element_shape(b, shape, element), b.replicated(number)])[0]

    b.register_materializer(node.outputs[0], materializer)
    return made


@contents("TensorListReserve", "EmptyTensorList")
def _new(known: Extents, node: Node) -> Content:
    # Elements that were never set are zeros: nothing is known of their numbers.
    reserved = node.type == "TensorListReserve"
    return Content(_declared(known, node.inputs[0]), NONE_YET, None if reserved else NONE_YET)


def _declared(known: Extents, shape: Value) -> Entries | None:
    result = known.numbers(shape)
    return None if result is None or result.is_scalar else result.entries


@rule("TensorListFromTensor", of_replicated=True)
def from_replicated_tensor(b: Context, node: Node) -> Made:
    made = b.make_replicated(node)
    value, shape = node.inputs

    def materializer(placement: Placement) -> tf.Tensor | None:
        if not isinstance(placement, TensorList) or placement.optional or value.dtype.name != placement.dtype:
            return None
        element = placement.element
        shard = element.at(element.axis + 1)
        if value.rank is None or shard.axis >= value.rank or not b.can_shard(value, shard):
            return None
        return b.make(node, [b.sharded(value, shard), _local_element_shape(b, shape, element)])[0]

    b.register_materializer(node.outputs[0], materializer)
    return made


@rule("TensorListFromTensor")
def from_tensor(b: Context, node: Node) -> Made | None:
    value, shape = node.inputs
    placement = b.placement(value)
    if not isinstance(placement, Sharded) or placement.axis == 0 or not isinstance(b.placement(shape), Replicated):
        return None
    element = placement.at(placement.axis - 1)
    made = b.make(node, [b.local(value), _local_element_shape(b, shape, element)])[0]
    return [(made, TensorList(element, value.dtype.name))]


@contents("TensorListFromTensor", "TensorListScatterV2")
def _from_tensor(known: Extents, node: Node) -> Content:
    dims = known.dims(node.inputs[0])
    shape = node.inputs[1 if node.type == "TensorListFromTensor" else 2]
    return Content(_declared(known, shape), None if dims is None else dims[1:], None)


# ---- writing


@rule("TensorListSetItem", "TensorListPushBack")
def put(b: Context, node: Node) -> Made | None:
    values, item = node.inputs[0], node.inputs[-1]
    placement, of_item = _list_placement(b, values), b.placement(item)
    if placement is None:
        if not isinstance(of_item, Sharded):
            return None
        placement = TensorList(of_item, item.dtype.name)
    if of_item != placement.element and not b.can_shard(item, placement.element):
        return None
    tensor = b.tensor_list(values, placement)
    if tensor is None:
        return None
    between = [b.replicated(each) for each in node.inputs[1:-1]]
    return [(b.make(node, [tensor, *between, b.sharded(item, placement.element)])[0], placement)]


@contents("TensorListSetItem", "TensorListPushBack")
def _put(known: Extents, node: Node) -> Content | None:
    before, item = known.content(node.inputs[0]), node.inputs[-1]
    return None if before is None else joined(before, _of_element(known, before.declared, item))


def _of_element(known: Extents, declared: Entries | None, value: Value) -> Content:
    result = known.numbers(value)
    return Content(declared, known.dims(value), None if result is None else result.entries)


@rule("TensorListResize")
def resize(b: Context, node: Node) -> Made | None:
    values, size = node.inputs
    placement = _list_placement(b, values)
    return None if placement is None else [(b.make(node, [b.local(values), b.replicated(size)])[0], placement)]


@contents("TensorListPopBack", "TensorListResize")
def _same(known: Extents, node: Node) -> Content | None:
    return known.content(node.inputs[0])


# ---- reading


@rule("TensorListGetItem", "TensorListStack", "TensorListGather")
def get(b: Context, node: Node) -> Made | None:
    values, shape = node.inputs[0], node.inputs[-1]
    placement = _list_placement(b, values)
    if placement is None or b.dims(node.outputs[0]) is None:
        return None
    element = placement.element
    between = [b.replicated(each) for each in node.inputs[1:-1]]
    made = b.make(node, [b.local(values), *between, _local_element_shape(b, shape, element)])[0]
    return [(made, element.at(element.axis + (node.type != "TensorListGetItem")))]


@rule("TensorListPopBack")
def pop_back(b: Context, node: Node) -> Made | None:
    values, shape = node.inputs
    placement = _list_placement(b, values)
    if placement is None or b.dims(node.outputs[1]) is None:
        return None
    rest, element = b.make(node, [b.local(values), _local_element_shape(b, shape, placement.element)])
    return [(rest, placement), (element, placement.element)]


@extents("TensorListGetItem")
def _got(known: Extents, node: Node) -> ResultExtents:
    return [_element_dims(known, node, node.inputs[2])]


@extents("TensorListStack", "TensorListGather")
def _stacked(known: Extents, node: Node) -> ResultExtents:
    dims = _element_dims(known, node, node.inputs[-1])
    return [None if dims is None else (None, *dims)]


@extents("TensorListPopBack")
def _popped(known: Extents, node: Node) -> ResultExtents:
    return [None, _element_dims(known, node, node.inputs[1])]


def _element_dims(known: Extents, node: Node, operand: Value | None) -> Entries | None:
    content = known.content(node.inputs[0])
    dims = content.known_dims() if content is not None else None
    asked = known.numbers(operand) if operand is not None else None
    if asked is None or asked.is_scalar:
        return dims
    entries = tuple(None if each == -1 else each for each in asked.entries)
    if dims is None or len(dims) != len(entries):
        return entries
    return tuple(a if a is not None else b for a, b in zip(entries, dims))


@numbers("TensorListPopBack", "OptionalGetValue")
def _number(known: Extents, node: Node) -> list[Numbers | None]:
    content, output = known.content(node.inputs[0]), node.outputs[-1]
    known_numbers = content.known_numbers() if content is not None else None
    entries = complete(known_numbers) if known_numbers is not None and output.rank in (0, 1) else None
    return [None] * (len(node.outputs) - 1) + [None if entries is None else Numbers(entries, output.rank == 0)]


# ---- what is known of a list


@rule("TensorListLength", "OptionalHasValue")
def length(b: Context, node: Node) -> Made:
    return [(b.make(node, [b.local(node.inputs[0])])[0], REPLICATED)]


@rule("TensorListElementShape")
def element_shape(b: Context, node: Node) -> Made | None:
    """The element shape with which the list of global elements was declared."""
    shape = _declared_of(b.extents, node.inputs[0])
    return None if shape is None else [(b.vector(shape.entries, node.outputs[0].dtype), REPLICATED)]


@numbers("TensorListElementShape")
def _element_shape(known: Extents, node: Node) -> Numbers | None:
    return _declared_of(known, node.inputs[0])


def _declared_of(known: Extents, values: Value) -> Numbers | None:
    content = known.content(values)
    declared = complete(content.declared) if content is not None and content.declared is not None else None
    return None if declared is None else Numbers(declared)


# ---- Optionals


@rule("OptionalNone", of_replicated=True)
def nothing(b: Context, node: Node) -> Made:
    made = b.make_replicated(node)

    def materializer(placement: Placement) -> tf.Tensor | None:
        return made[0].tensor if isinstance(placement, TensorList) and placement.optional else None

    b.register_materializer(node.outputs[0], materializer)
    return made


@contents("OptionalNone")
def _nothing(known: Extents, node: Node) -> Content:
    return Content(None, NONE_YET, NONE_YET)


@rule("OptionalFromValue")
def optional(b: Context, node: Node) -> Made | None:
    placement = b.placement(node.inputs[0])
    if len(node.inputs) != 1 or not isinstance(placement, Sharded):
        return None
    made = b.make(node, [b.local(node.inputs[0])])[0]
    return [(made, TensorList(placement, node.inputs[0].dtype.name, True))]


@contents("OptionalFromValue")
def _optional(known: Extents, node: Node) -> Content | None:
    return _of_element(known, None, node.inputs[0]) if len(node.inputs) == 1 else None


@rule("OptionalGetValue")
def open_optional(b: Context, node: Node) -> Made | None:
    placement, output = _list_placement(b, node.inputs[0]), node.outputs[0]
    if placement is None or len(node.outputs) != 1 or b.dims(output) is None:
        return None
    shape = b.static_local_shape(output.shape, placement.element)
    made = tf.raw_ops.OptionalGetValue(
        optional=b.local(node.inputs[0]), output_types=[output.dtype], output_shapes=[shape]
    )[0]
    b.ran(made.op)
    return [(made, placement.element)]


@extents("OptionalGetValue")
def _opened(known: Extents, node: Node) -> ResultExtents:
    return [_element_dims(known, node, None), *[None] * (len(node.outputs) - 1)]


# ---- gradients


@rule("AddN", "ZerosLike")
def entrywise(b: Context, node: Node) -> Made | None:
    """Builds it for lists in one placement, and for tensors as their specs (specs/entrywise.py) say."""
    placement = next((each for each in map(b.placement, node.inputs) if isinstance(each, TensorList)), None)
    if placement is None:
        return propagate(b, node)
    tensors = complete(b.tensor_list(each, placement) for each in node.inputs)
    return None if tensors is None else [(b.make(node, tensors)[0], placement)]
