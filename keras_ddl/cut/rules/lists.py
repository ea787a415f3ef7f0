"""Rules for lists of tensors, which loops read and write. On a rank, a sharded list holds the rank's shard of each
element.

An Optional is a list of at most one element. Each type of operation has a signature: a letter for each operand and
result. It determines how the operation is built (`list_operation`) and what is known about its results:

    L  a list    E  one of its elements    T  all of them, along a new axis 0    S  the shape of an element    n  other
"""

from __future__ import annotations

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.analysis.attributes import AttrValue
from keras_ddl.cut.analysis.contents import NONE_YET, Content, Entries, joined
from keras_ddl.cut.analysis.dims import Dim, Uncertain, certain, if_certain
from keras_ddl.cut.analysis.extents import Extents, ResultExtents, ResultNumbers, contents, extents, numbers
from keras_ddl.cut.analysis.placements import REPLICATED, PlacedOutputs, Placement, Sharded, TensorList
from keras_ddl.cut.analysis.program import Node, Value
from keras_ddl.cut.operations.context import Context
from keras_ddl.cut.operations.propagation import propagate
from keras_ddl.cut.operations.registry import rule
from keras_ddl.cut.values.local_shapes import Scalar

# Operations whose result, built from replicated operands, can become sharded later, when a shard is put into it.
_NEW = {
    "TensorListReserve": "Sn->L",
    "EmptyTensorList": "Sn->L",
    "TensorListFromTensor": "TS->L",
    "OptionalNone": "->L",
}
_SIGNATURES = {
    **_NEW,
    "TensorListSetItem": "LnE->L",
    "TensorListPushBack": "LE->L",
    "TensorListPopBack": "LS->LE",
    "TensorListResize": "Ln->L",
    "TensorListGetItem": "LnS->E",
    "TensorListStack": "LS->T",
    "TensorListGather": "LnS->T",
    "TensorListLength": "L->n",
    "TensorListScatterV2": "TnSn->L",
    "OptionalFromValue": "E->L",
    "OptionalGetValue": "L->E",
    "OptionalHasValue": "L->n",
}


def _signature(node: Node) -> tuple[str, str]:
    """Returns the letters of operands and of results."""
    operands, results = _SIGNATURES[node.type].split("->")
    if (len(operands), len(results)) != (len(node.inputs), len(node.outputs)):
        raise Uncertain  # the Optional has several tensors
    return operands, results


def _types(letter: str) -> list[str]:
    """Returns the types that have this letter among their results."""
    return [each for each, signature in _SIGNATURES.items() if letter in signature.split("->")[1]]


# ---- building


@rule(*_SIGNATURES.keys() - {"TensorListScatterV2"})
def list_operation(b: Context, node: Node) -> PlacedOutputs | None:
    """Builds an operation on a list that is sharded, or becomes sharded because one of its elements is."""
    operands, results = _signature(node)
    return _build_on_lists(b, node, operands, results)


@rule("AddN", "ZerosLike")
def entrywise(b: Context, node: Node) -> PlacedOutputs | None:
    """Builds an operation for lists in one placement, and for tensors as their specs (specs/entrywise.py) say."""
    if any(isinstance(b.placement(each), TensorList) for each in node.inputs):
        return _build_on_lists(b, node, "L" * len(node.inputs), "L")
    return propagate(b, node)


def _build_on_lists(b: Context, node: Node, operands: str, results: str) -> PlacedOutputs | None:
    placement = _list_placement(b, node, operands)
    if placement is None:
        return None
    for value, letter in zip(node.outputs, results):
        if letter in "ET":
            b.dims(value)  # raises Uncertain: its rank is unknown
    made = _make(b, node, operands, placement)
    of: dict[str, Placement] = {
        "L": placement,
        "E": placement.element,
        "T": _stacked(placement.element),
        "n": REPLICATED,
    }
    return [(tensor, of[letter]) for tensor, letter in zip(made, results)]


def _stacked(element: Sharded) -> Sharded:
    return element.at(element.axis + 1)


def _list_placement(b: Context, node: Node, operands: str) -> TensorList | None:
    """Returns the placement of an operation's list: its own, or the one that its elements require."""
    pairs: list[tuple[Value, Placement, str]] = [
        (value, b.placement(value), letter) for value, letter in zip(node.inputs, operands)
    ]
    for _, placement, _ in pairs:
        if isinstance(placement, TensorList):
            return placement
    for value, placement, letter in pairs:
        axis = {"E": 0, "T": 1}.get(letter)
        if isinstance(placement, Sharded) and axis is not None and placement.axis >= axis:
            is_optional = node.type.startswith("Optional")
            return TensorList(placement.at(placement.axis - axis), value.dtype.name, is_optional)
    return None


def _make(b: Context, node: Node, operands: str, placement: TensorList) -> list[tf.Tensor]:
    """Builds an operation whose list is in this placement."""
    element = placement.element
    tensors = []
    for value, letter in zip(node.inputs, operands):
        if letter == "L":
            tensors.append(b.redistributed(value, placement))
        elif letter in "ET":
            shard = element if letter == "E" else _stacked(element)
            if not b.can_shard(value, shard):
                raise Uncertain
            tensors.append(b.redistributed(value, shard))
        else:
            tensors.append(_local_element_shape(b, value, element) if letter == "S" else b.replicated(value))
    attrs: dict[str, AttrValue] = {}
    if node.type == "OptionalGetValue":
        shape = b.static_local_shape(node.outputs[0].shape, element)
        attrs["output_shapes"] = AttrValue(list=AttrValue.ListValue(shape=[shape.as_proto()]))
    return b.make(node, tensors, **attrs)


def _local_element_shape(b: Context, operand: Value, element: Sharded) -> tf.Tensor:
    """Returns the shape of a rank's elements, given the global elements' shape; open extents (-1) stay open."""
    if operand.rank == 0:
        return b.replicated(operand)
    known = if_certain(b.extents.constants, operand)
    if known is not None:
        entries: list[Scalar] = [*known]
        entries[element.axis] = -1 if entries[element.axis] == -1 else b.local_extent(element)
        return b.vector(entries, operand.dtype)
    shape = tf.cast(b.replicated(operand), tf.int64)
    local = tf.where(shape < 0, shape, tf.cast(b.local_extent(element), tf.int64))
    is_sharded = tf.equal(tf.range(tf.size(shape)), element.axis)  # in TensorFlow 1, == compares objects
    return tf.cast(tf.where(is_sharded, local, shape), operand.dtype)


@rule(*_NEW, of_replicated=True)
def new_list(b: Context, node: Node) -> PlacedOutputs:
    """Builds a list of replicated elements; each rank can build the list of its shards."""
    operands, _ = _signature(node)
    is_optional = node.type == "OptionalNone"

    def materializer(placement: Sharded | TensorList) -> tf.Tensor:
        if not isinstance(placement, TensorList) or placement.optional != is_optional:
            raise Uncertain
        if not is_optional and not _can_hold(b, node, operands, placement):
            raise Uncertain
        return _make(b, node, operands, placement)[0]

    b.register_materializer(node.outputs[0], materializer)
    return b.make_replicated(node)


def _can_hold(b: Context, node: Node, operands: str, placement: TensorList) -> bool:
    """Whether elements of a new list can be the shards of this placement."""
    element = placement.element
    if node.attr("element_dtype", tf.DType).name != placement.dtype:
        return False
    if "T" in operands:
        rank = node.inputs[0].rank
        return rank is not None and element.axis + 1 < rank
    if node.inputs[0].rank == 0:
        return True
    shape = b.extents.vector(node.inputs[0])
    return element.axis < len(shape) and shape[element.axis] in (-1, b.extent(element))


@rule("TensorListElementShape")
def element_shape(b: Context, node: Node) -> PlacedOutputs:
    """Returns the shape of elements with which the list was declared, that of global elements."""
    return [(b.vector(_declared(b.extents, node), node.outputs[0].dtype), REPLICATED)]


# ---- extents and entries of results


@contents(*_types("L"))
def _content(known: Extents, node: Node) -> Content:
    """Returns the facts that hold for elements of the operand, if it is a list, and for new elements."""
    operands, _ = _signature(node)
    values = dict(zip(operands, node.inputs))
    if "L" in values:
        result = known.content(values["L"])
    else:
        declared = if_certain(known.vector, values["S"]) if "S" in values else None
        # Elements that were never set are zeros, so no entries are known.
        result = Content(declared, NONE_YET, None if node.type == "TensorListReserve" else NONE_YET)
    if "E" in values:
        dims, entries = if_certain(known.dims, values["E"]), if_certain(known.numbers, values["E"])
        return certain(joined(result, Content(result.declared, dims, entries)))
    if "T" in values:
        dims = if_certain(known.dims, values["T"])
        return certain(joined(result, Content(result.declared, None if dims is None else dims[1:], None)))
    return result


@extents(*_types("E"), *_types("T"))
def _result_extents(known: Extents, node: Node) -> ResultExtents:
    operands, results = _signature(node)
    values = dict(zip(operands, node.inputs))
    dims = _element_dims(known, values["L"], values.get("S"))
    of: dict[str, Entries | None] = {"E": dims, "T": None if dims is None else (None, *dims)}
    return [of.get(letter) for letter in results]


def _element_dims(known: Extents, values: Value, shape: Value | None) -> Entries | None:
    """Returns the extents of an element, as far as the list and the requested shape show them."""
    content = if_certain(known.content, values)
    dims = content.known_dims() if content is not None else None
    requested = if_certain(known.vector, shape) if shape is not None else None
    if requested is None:
        return dims
    entries = tuple(None if each == -1 else each for each in requested)
    if dims is None or len(dims) != len(entries):
        return entries
    return tuple(a if a is not None else b for a, b in zip(entries, dims))


@numbers(*_types("E"))
def _element_numbers(known: Extents, node: Node) -> ResultNumbers:
    _, results = _signature(node)
    entries = certain(known.content(node.inputs[0]).known_numbers())
    element = [certain(each) for each in entries]
    return [element if letter == "E" else None for letter in results]


@numbers("TensorListElementShape")
def _element_shape(known: Extents, node: Node) -> ResultNumbers:
    return [_declared(known, node)]


def _declared(known: Extents, node: Node) -> list[Dim]:
    return [certain(each) for each in certain(known.content(node.inputs[0]).declared)]
