"""Sums, means, extremes over axes."""

from __future__ import annotations

from typing import Any

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.axes import reduced_axes
from keras_ddl.cut.dims import ONE, product
from keras_ddl.cut.registry import rule
from keras_ddl.cut.states import PARTIAL, Partial, Rows, Whole

_COMBINED = {"Sum": "sum", "Mean": "sum", "Max": "max", "Min": "min", "Prod": "product", "All": "min", "Any": "max"}
_HALF = (tf.float16, tf.bfloat16)


def axes_of(b: Any, node: Any) -> list[int] | None:
    """Returns the axes that are certainly reduced, if nothing depends on whether others of extent 1 are, too."""
    dims = b.dims(node.inputs[0])
    found = reduced_axes(b.extents, node.inputs[1])
    if dims is None or found is None:
        return None
    axes, perhaps = found
    if perhaps and not node.attr("keep_dims") and not b.is_only_reshaped(node.outputs[0]):
        return None
    return sorted({axis % max(len(dims), 1) for axis in axes})


@rule(*_COMBINED)
def reduce(b: Any, node: Any) -> Any:
    value, keep = node.inputs[0], node.attr("keep_dims")
    state, axes = b.state(value), axes_of(b, node)
    if axes is None or not isinstance(b.state(node.inputs[1]), Whole):
        return None
    if node.type == "Mean" and not value.dtype.is_floating or value.dtype == tf.string:
        return None
    if isinstance(state, Partial):
        if state != PARTIAL or node.type not in ("Sum", "Mean") or not value.dtype.is_floating:
            return None
        made, state = _made(b, node, axes), PARTIAL
    elif state.axis not in axes:
        at = state.axis if keep else state.axis - sum(axis < state.axis for axis in axes)
        made, state = _made(b, node, axes), state.at(at)
    elif node.type == "Mean":
        made, state = _mean(b, node, axes), PARTIAL
    else:
        made, state = _made(b, node, axes), Partial(_COMBINED[node.type])
    dims = [ONE if axis in axes else each for axis, each in enumerate(b.dims(value)) if keep or axis not in axes]
    b.extents.set_dims(node.outputs[0], tuple(dims))
    return [(made, state)]


def _made(b: Any, node: Any, axes: list[int]) -> Any:
    return b.make(node, [b.held(node.inputs[0]), b.as_vector(axes, node.inputs[1].dtype)])[0]


def _mean(b: Any, node: Any, axes: list[int]) -> Any:
    """The rank's sum over the count of all ranks; in float32 for halves, whose sums overflow before their mean does."""
    value = node.inputs[0]
    count = b.number(product(b.dims(value)[axis] for axis in axes))
    wide = tf.float32 if value.dtype in _HALF else value.dtype
    over = b.as_vector(axes, tf.int32)
    total = tf.reduce_sum(tf.cast(b.held(value), wide), over, keepdims=node.attr("keep_dims"))
    return tf.cast(total / b.scalars.scalar(count, wide), value.dtype)


@rule("L2Loss")
def l2_loss(b: Any, node: Any) -> Any:
    value = node.inputs[0]
    return None if isinstance(b.state(value), Partial) else [(b.make(node, [b.held(value)])[0], PARTIAL)]


@rule("ArgMax", "ArgMin")
def arg_max(b: Any, node: Any) -> Any:
    value = node.inputs[0]
    state, axis, dims = b.state(value), b.constants(node.inputs[1]), b.dims(value)
    if not isinstance(state, Rows) or axis is None or dims is None:
        return None
    at = axis[0] % len(dims)
    if at == state.axis:
        return None
    made = b.make(node, [b.held(value), b.whole(node.inputs[1])])[0]
    return [(made, state.at(state.axis - (at < state.axis)))]


@rule("Cumsum", "Cumprod", "CumulativeLogsumexp")
def cumulative(b: Any, node: Any) -> Any:
    value = node.inputs[0]
    state, axis, dims = b.state(value), b.constants(node.inputs[1]), b.dims(value)
    if not isinstance(state, Rows) or axis is None or dims is None or axis[0] % len(dims) == state.axis:
        return None
    return [(b.make(node, [b.held(value), b.whole(node.inputs[1])])[0], state)]
