"""Sums, means and extremes over axes, and other computations along an axis."""

from __future__ import annotations

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.analysis.dims import ONE, Uncertain, if_certain, product
from keras_ddl.cut.analysis.extents import Extents, ResultNumbers, numbers
from keras_ddl.cut.analysis.program import Node, Value
from keras_ddl.cut.operations.context import Context
from keras_ddl.cut.operations.factors import HALF, Factors, Kind, Linear, LocalOperands, labels_of, spec, without
from keras_ddl.cut.operations.propagation import is_floating

_COMBINE = {"Max": "max", "Min": "min", "Prod": "product", "All": "min", "Any": "max"}


def _reduced_axes(known: Extents, value: Value) -> tuple[list[int], frozenset[int]]:
    """Returns the axes that are certainly reduced, and further axes that are reduced only if their extent is 1.

    The gradient of a broadcast names axes along which the operand was repeated. Where both extents are 1 it also names
    the axis, which changes nothing but the number of axes.
    """
    constants = if_certain(known.constants, value)
    if constants is not None:
        return constants, frozenset()
    if value.node.type != "BroadcastGradientArgs":
        raise Uncertain
    shapes = [known.numbers(each) for each in value.node.inputs]
    rank = max(map(len, shapes))
    own, other = ((ONE,) * (rank - len(each)) + each for each in shapes)
    if value.index == 1:
        own, other = other, own
    axes, perhaps = [], set()
    for axis, (a, b) in enumerate(zip(own, other)):
        if a == 1:
            axes.append(axis)
        elif a.number is None and (a == b or b == 1):
            perhaps.add(axis)
        elif a.number is None:
            raise Uncertain
    return axes, frozenset(perhaps)


def _reduction(known: Extents, node: Node) -> Factors:
    value = node.inputs[0]
    if value.dtype == tf.string:
        raise Uncertain
    labels = labels_of(known.dims(value))
    named, perhaps = _reduced_axes(known, node.inputs[1])
    axes = {axis % max(len(labels), 1) for axis in named}
    if node.attr("keep_dims", bool):
        result = "".join("1" if axis in axes else each for axis, each in enumerate(labels))
        return Factors([labels, None], [result])
    return Factors([labels, None], [without(labels, sorted(axes))], only_if_reshaped=bool(perhaps))


def axes_of(b: Context, node: Node) -> list[int]:
    """Returns the axes that are certainly reduced, if nothing depends on whether others of extent 1 also are."""
    factors = _reduction(b.extents, node)
    if factors.only_if_reshaped and not b.is_only_reshaped(node.outputs[0]):
        raise Uncertain
    return _axes(factors)


def _axes(factors: Factors) -> list[int]:
    labels = factors.operands[0]
    assert isinstance(labels, str)
    return [axis for axis, each in enumerate(labels) if each not in factors.results[0]]


def _reduce(b: Context, node: Node, local: LocalOperands) -> list[tf.Tensor]:
    factors = local.factors
    axes, keep, dims = _axes(factors), node.attr("keep_dims", bool), b.dims(node.inputs[0])
    left = [ONE if axis in axes else each for axis, each in enumerate(dims) if keep or axis not in axes]
    b.extents.set_dims(node.outputs[0], tuple(left))
    if node.type == "Mean" and local.label is not None and local.label not in factors.results[0]:
        return [_mean(b, node, local.tensors[0], axes)]
    return b.make(node, [local.tensors[0], b.vector(axes, node.inputs[1].dtype)])


def _mean(b: Context, node: Node, tensor: tf.Tensor, axes: list[int]) -> tf.Tensor:
    """Returns the rank's sum over the count of all ranks, in float32 for 16-bit floats, whose sums may overflow."""
    value, dims = node.inputs[0], b.dims(node.inputs[0])
    count = b.number(product(dims[axis] for axis in axes))
    wide = tf.float32 if value.dtype in HALF else value.dtype
    over = b.vector(axes, tf.int32)
    total = tf.reduce_sum(tf.cast(tensor, wide), over, keepdims=node.attr("keep_dims", bool))
    return tf.cast(total / b.scalar(count, wide), value.dtype)


_SUM = Linear(at=(0,), when=is_floating)
spec("Sum", combine="sum", linear=_SUM, kind=Kind.REDUCTION, make=_reduce)(_reduction)
for _type, _combine in _COMBINE.items():
    spec(_type, combine=_combine, kind=Kind.REDUCTION, make=_reduce)(_reduction)


@spec("Mean", combine="sum", linear=_SUM, kind=Kind.REDUCTION, make=_reduce)
def _mean_of_floats(known: Extents, node: Node) -> Factors:
    if not node.inputs[0].dtype.is_floating:
        raise Uncertain
    return _reduction(known, node)


@spec("L2Loss", combine="sum", kind=Kind.REDUCTION)
def _l2_loss(known: Extents, node: Node) -> Factors:
    return Factors([labels_of(known.dims(node.inputs[0]))], [""])


@spec("ArgMax", "ArgMin")
def _arg_max(known: Extents, node: Node) -> Factors:
    along = _along(known, node)
    return Factors([along, None], ["".join(each for each in along if each.islower())])


def _cumulative(known: Extents, node: Node) -> Factors:
    along = _along(known, node)
    return Factors([along, None], [along])


spec("Cumprod", "CumulativeLogsumexp")(_cumulative)
spec("Cumsum", linear=_SUM)(_cumulative)
spec("ReverseV2", linear=Linear(at=(0,), moves=True))(_cumulative)


def _along(known: Extents, node: Node) -> str:
    return labels_of(known.dims(node.inputs[0]), known.constants(node.inputs[1]))


@numbers("Prod")
def _product(known: Extents, node: Node) -> ResultNumbers:
    if known.constants(node.inputs[1]) not in ([0], [-1]):
        raise Uncertain
    return [[product(known.vector(node.inputs[0]))]]
