"""Functions that lines of drawn programs call for more than one expression."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from keras_ddl.compat.tensorflow import tf

raw = tf.raw_ops


def call(kind: str, *operands: Any) -> Any:
    """Runs an operation by its type. The gradient of types that have none is stopped instead of raising an error."""
    more = {"DstT": tf.float64} if kind == "Cast" else {}
    found = getattr(raw, kind)(**dict(zip(_names(kind), operands)), **more)
    return found if _has_gradient(kind) else tf.stop_gradient(found)


def _names(kind: str) -> list[str]:
    return list(getattr(raw, kind).__signature__.parameters)


@functools.cache
def _has_gradient(kind: str) -> bool:
    try:
        tf.compat.v1.get_default_graph()
        with tf.Graph().as_default():
            operands = [tf.compat.v1.placeholder(tf.float64, [2]) for name in _names(kind) if name != "name"]
            found = getattr(raw, kind)(**dict(zip(_names(kind), operands)))
            tf.gradients(found, operands)
    except (LookupError, TypeError, ValueError):
        return False
    return True


def inner_gradient(function: Callable[[Any], Any], value: Any) -> Any:
    """Returns the gradient of the sum of `function`; the program differentiates it once more."""
    with tf.GradientTape() as tape:
        tape.watch(value)
        total = tf.reduce_sum(function(value))
    return tape.gradient(total, value, unconnected_gradients="zero")


def clipped(value: Any) -> Any:
    @tf.custom_gradient
    def clip(value: Any) -> Any:
        return tf.identity(value), lambda gradient: tf.clip_by_norm(gradient, 0.1)

    return clip(value)


def called(function: Callable[[Any], Any], value: Any) -> Any:
    return tf.function(function, autograph=False)(value)


def listed(value: Any, how: str) -> Any:
    """Returns `value` after passing its rows through a list."""
    shape, count = tf.shape(value)[1:], tf.shape(value)[0]
    kind = {"element_dtype": value.dtype}
    values = raw.TensorListFromTensor(tensor=value, element_shape=shape)
    if how == "gather":
        indices = tf.range(count)[::-1]
        return raw.TensorListGather(input_handle=values, indices=indices, element_shape=shape, **kind)
    if how == "set":
        first = raw.TensorListGetItem(input_handle=values, index=0, element_shape=shape, **kind)
        values = raw.TensorListSetItem(input_handle=values, index=count - 1, item=first * 2)
    if how == "push":
        values, last = raw.TensorListPopBack(input_handle=values, element_shape=shape, **kind)
        values = raw.TensorListPushBack(input_handle=values, tensor=tf.tanh(last))
        values = raw.TensorListPushBack(input_handle=values, tensor=last)
    if how == "new":
        values = raw.EmptyTensorList(element_shape=tf.shape(value), max_num_elements=-1, **kind)
        for each in (value, value * 0.5):
            values = raw.TensorListPushBack(input_handle=values, tensor=each)
        shape = tf.shape(value)
    if how == "reserve":
        values = raw.TensorListReserve(element_shape=tf.shape(value), num_elements=3, **kind)
        for i in (2, 0):
            values = raw.TensorListSetItem(input_handle=values, index=i, item=value * (i + 1.0))
        shape = tf.shape(value)
    return raw.TensorListStack(input_handle=values, element_shape=shape, **kind)


def in_rounds(function: Callable[[Any, Any], Any], value: Any) -> Any:
    """Returns function(i, value[i]) for each i, written to an array in a loop."""
    parts = tf.TensorArray(value.dtype, tf.shape(value)[0])

    def round_(i: Any, parts: Any) -> Any:
        return i + 1, parts.write(i, function(i, value[i]))

    return tf.while_loop(lambda i, _: i < tf.shape(value)[0], round_, (0, parts))[1].stack()


BY_NAME = {each.__name__: each for each in (call, inner_gradient, clipped, called, listed, in_rounds)}
