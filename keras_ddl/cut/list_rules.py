"""Extents and integers that come out of lists; imported for what it registers in extents.py."""

from __future__ import annotations

from typing import Any

from keras_ddl.cut.contents import NONE_YET, Content, joined
from keras_ddl.cut.extents import Extents, Numbers, contents, extents, numbers
from keras_ddl.cut.program import Node, Value


def _declared(known: Extents, shape: Value) -> Any:
    found = known.numbers(shape)
    return None if found is None or found.is_scalar else found.entries


def _of_element(known: Extents, declared: Any, value: Value) -> Content:
    found = known.numbers(value)
    dims = known.dims(value)
    return Content(declared, dims, None if found is None else found.entries)


@contents("TensorListReserve", "EmptyTensorList")
def _new(known: Extents, node: Node) -> Content:
    # Elements that were never set are zeros: nothing is known of their numbers.
    reserved = node.type == "TensorListReserve"
    return Content(_declared(known, node.inputs[0]), NONE_YET, None if reserved else NONE_YET)


@contents("TensorListFromTensor", "TensorListScatterV2")
def _from_tensor(known: Extents, node: Node) -> Content:
    dims = known.dims(node.inputs[0])
    shape = node.inputs[1 if node.type == "TensorListFromTensor" else 2]
    return Content(_declared(known, shape), None if dims is None else dims[1:], None)


@contents("TensorListSetItem", "TensorListPushBack")
def _put(known: Extents, node: Node) -> Content | None:
    before, item = known.content(node.inputs[0]), node.inputs[-1]
    return None if before is None else joined(before, _of_element(known, before.declared, item))


@contents("TensorListPopBack", "TensorListResize", "Identity")
def _same(known: Extents, node: Node) -> Content | None:
    return known.content(node.inputs[0])


@contents("OptionalFromValue")
def _optional(known: Extents, node: Node) -> Content | None:
    return _of_element(known, None, node.inputs[0]) if len(node.inputs) == 1 else None


@contents("OptionalNone")
def _nothing(known: Extents, node: Node) -> Content:
    return Content(None, NONE_YET, NONE_YET)


def _element_dims(known: Extents, node: Node, operand: Value | None) -> Any:
    content = known.content(node.inputs[0])
    dims = content.known_dims() if content is not None else None
    asked = known.numbers(operand) if operand is not None else None
    if asked is None or asked.is_scalar:
        return dims
    entries = [None if each == -1 else each for each in asked.entries]
    if dims is None or len(dims) != len(entries):
        return entries
    return [a if a is not None else b for a, b in zip(entries, dims)]


@extents("TensorListGetItem")
def _got(known: Extents, node: Node) -> list[Any]:
    return [_element_dims(known, node, node.inputs[2])]


@extents("TensorListPopBack")
def _popped(known: Extents, node: Node) -> list[Any]:
    return [None, _element_dims(known, node, node.inputs[1])]


@extents("OptionalGetValue")
def _opened(known: Extents, node: Node) -> list[Any]:
    return [_element_dims(known, node, None), *[None] * (len(node.outputs) - 1)]


@extents("TensorListStack", "TensorListGather")
def _stacked(known: Extents, node: Node) -> list[Any]:
    dims = _element_dims(known, node, node.inputs[-1])
    return [None if dims is None else (None, *dims)]


@numbers("TensorListPopBack", "OptionalGetValue")
def _number(known: Extents, node: Node) -> list[Numbers | None]:
    content, output = known.content(node.inputs[0]), node.outputs[-1]
    entries = content.known_numbers() if content is not None else None
    certain = entries is not None and None not in entries and output.rank in (0, 1)
    return [None] * (len(node.outputs) - 1) + [Numbers(entries, output.rank == 0) if certain else None]


@numbers("TensorListElementShape")
def _element_shape(known: Extents, node: Node) -> Numbers | None:
    content = known.content(node.inputs[0])
    certain = content is not None and content.declared is not None and None not in content.declared
    return Numbers(content.declared) if certain else None
