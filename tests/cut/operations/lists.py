"""Programs with lists of tensors, which TensorFlow uses for branches, loops and their gradients."""

from __future__ import annotations

from typing import Any

from cut.operations.cases import case

from keras_ddl.compat.tensorflow import tf

raw = tf.raw_ops
_OF = {"element_dtype": tf.float64}


def _stack(values: Any, shape: Any) -> Any:
    return raw.TensorListStack(input_handle=values, element_shape=shape, **_OF)


def _item(values: Any, index: int, shape: Any) -> Any:
    return raw.TensorListGetItem(input_handle=values, index=index, element_shape=shape, **_OF)


def _with_item(values: Any, index: int, item: Any) -> Any:
    return raw.TensorListSetItem(input_handle=values, index=index, item=item)


@case("TensorListFromTensor", "TensorListGetItem", "TensorListSetItem", "TensorListStack", "TensorListGather")
@case("TensorListPopBack", "TensorListResize", "TensorListLength", "TensorListElementShape")
def lists_of_a_tensor(x: Any) -> Any:
    """Uses lists of x's columns (each element has rows), of its rows, and of a sum over rows."""
    found = []
    for value in (tf.transpose(x), x, tf.reduce_sum(x, 0)[None]):
        shape = tf.shape(value)[1:]
        values = raw.TensorListFromTensor(tensor=value, element_shape=shape)
        rest, last = raw.TensorListPopBack(input_handle=values, element_shape=shape, **_OF)
        longer = raw.TensorListResize(input_handle=values, size=tf.shape(value)[0] + 1)
        found += [_stack(values, shape), _item(values, 0, shape) * 2, last, _stack(rest, shape), _stack(longer, shape)]
        found += [raw.TensorListGather(input_handle=values, indices=[0, 0], element_shape=shape, **_OF)]
        found += [_stack(_with_item(values, 0, last * 3), shape), _stack(values, -1)]
        found += [raw.TensorListLength(input_handle=longer)]
        found += [raw.TensorListElementShape(input_handle=values, shape_type=tf.int64)]
    return found


@case("EmptyTensorList", "TensorListReserve", "TensorListPushBack")
def lists_that_are_filled(x: Any) -> Any:
    found, s = [], tf.reduce_sum(x, 0)
    for shape, items in ((tf.shape(x), (x, x * 2)), ([-1, 3], (x, x)), ([3], (s, x[0])), (tf.shape(x), (x, x * 0 + s))):
        empty = raw.EmptyTensorList(element_shape=shape, max_num_elements=-1, **_OF)
        reserved = raw.TensorListReserve(element_shape=shape, num_elements=2, **_OF)
        for index, item in enumerate(items):
            empty = raw.TensorListPushBack(input_handle=empty, tensor=item)
            reserved = _with_item(reserved, index, item)
        whole = tf.shape(items[0])
        found += [_stack(empty, whole), _stack(reserved, whole), _item(reserved, 1, whole)]
        found += [raw.TensorListLength(input_handle=empty)]
    partly = _with_item(raw.TensorListReserve(element_shape=tf.shape(x), num_elements=3, **_OF), 1, x)
    return [*found, _stack(partly, tf.shape(x)), _item(partly, 0, tf.shape(x))]


@case("OptionalFromValue", "OptionalGetValue", "OptionalHasValue", "OptionalNone")
def optionals(x: Any) -> Any:
    found = []
    for value in (x, tf.transpose(x), tf.reduce_sum(x, 0), tf.reduce_max(x, 0)):
        some = raw.OptionalFromValue(components=[value])
        found += raw.OptionalGetValue(optional=some, output_types=[tf.float64], output_shapes=[value.shape])
        found += [raw.OptionalHasValue(optional=some)]
    return [*found, raw.OptionalHasValue(optional=raw.OptionalNone())]
