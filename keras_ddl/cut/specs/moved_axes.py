"""Operations that move entries and compute nothing: parts of every combination stay such parts."""

from __future__ import annotations

import numpy as np

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.context import Context
from keras_ddl.cut.dims import Dim, complete
from keras_ddl.cut.extents import Dims, Extents, Numbers, numbers, reshaped
from keras_ddl.cut.factors import NEW, Factors, Linear, Making, ShapeOf, labels_of, spec, without
from keras_ddl.cut.program import Node

_MOVES = Linear(at=(0,), moves=True)


@spec("Transpose", "ConjugateTranspose", linear=_MOVES)
def _transpose(known: Extents, node: Node) -> Factors | None:
    order, labels = known.constants(node.inputs[1]), labels_of(known.dims(node.inputs[0]))
    if order is None or labels is None:
        return None
    return Factors([labels, None], ["".join(labels[axis] for axis in order)])


@spec("ExpandDims", linear=_MOVES)
def _expand_dims(known: Extents, node: Node) -> Factors | None:
    axis, labels = known.constants(node.inputs[1]), labels_of(known.dims(node.inputs[0]))
    if axis is None or labels is None:
        return None
    at = axis[0] % (len(labels) + 1)
    return Factors([labels, None], [labels[:at] + "1" + labels[at:]])


@spec("Roll", linear=_MOVES)
def _roll(known: Extents, node: Node) -> Factors | None:
    axes = known.constants(node.inputs[2])
    labels = None if axes is None else labels_of(known.dims(node.inputs[0]), axes)
    return None if labels is None else Factors([labels, None, None], [labels])


@spec("ReverseSequence", linear=_MOVES)
def _reverse_sequence(known: Extents, node: Node) -> Factors | None:
    labels = labels_of(known.dims(node.inputs[0]), [node.attr("seq_dim", int)])
    return None if labels is None else Factors([labels, labels[node.attr("batch_dim", int)]], [labels])


def _squeezed_axes(dims: Dims | None, node: Node) -> list[int] | None:
    """Returns the axes that a Squeeze takes from a tensor of extents `dims`; None if they are not certain."""
    if dims is None:
        return None
    named = [axis % len(dims) for axis in node.attr("squeeze_dims", list)]
    are_certain = named or all(each.number is not None for each in dims)
    return (named or [axis for axis, each in enumerate(dims) if each == 1]) if are_certain else None


def _make_squeeze(b: Context, node: Node, making: Making) -> list[tf.Tensor]:
    # Names the axes, because a rank may have one row where the batch has more.
    axes = _squeezed_axes(b.dims(node.inputs[0]), node)
    return [tf.squeeze(making.tensors[0], axes) if axes else tf.identity(making.tensors[0])]


@spec("Squeeze", linear=_MOVES, make=_make_squeeze)
def _squeeze(known: Extents, node: Node) -> Factors | None:
    dims = known.dims(node.inputs[0])
    axes, labels = _squeezed_axes(dims, node), labels_of(dims)
    return None if axes is None or labels is None else Factors([labels], [without(labels, axes)])


@spec("BroadcastTo")
def _broadcast_to(known: Extents, node: Node) -> Factors | None:
    dims, shape = known.dims(node.inputs[0]), known.numbers(node.inputs[1])
    if dims is None or shape is None or any(each == -1 for each in shape.entries):  # -1 says nothing of an extent
        return None
    skipped = len(shape.entries) - len(dims)
    unsure = [
        axis + skipped for axis, (own, entry) in enumerate(zip(dims, shape.entries[skipped:])) if own not in (entry, 1)
    ]
    result = labels_of(shape.entries, unsure)
    if result is None or skipped < 0:
        return None
    pairs = zip(dims, shape.entries[skipped:], result[skipped:])
    operand = "".join("1" if own == 1 and entry != 1 else label for own, entry, label in pairs)
    return Factors([operand, ShapeOf(result)], [result])


@spec("Pack", linear=Linear(together=True, moves=True))
def _pack(known: Extents, node: Node) -> Factors | None:
    labels = labels_of(known.dims(node.inputs[0]))
    if labels is None:
        return None
    axis = node.attr("axis", int) % (len(labels) + 1)
    return Factors([labels] * len(node.inputs), [labels[:axis] + NEW + labels[axis:]], new=Dim(len(node.inputs)))


@spec("Unpack", linear=_MOVES)
def _unpack(known: Extents, node: Node) -> Factors | None:
    labels = labels_of(known.dims(node.inputs[0]), [node.attr("axis", int)])
    if labels is None:
        return None
    return Factors([labels], ["".join(each for each in labels if each.islower())] * len(node.outputs))


def _ensure(b: Context, node: Node, making: Making) -> list[tf.Tensor]:
    shape = node.outputs[0].shape.as_list()
    # What is said of the global axis holds by the extents that were traced.
    sharded = making.factors.results[0].find(making.label or " ")
    return [tf.ensure_shape(making.tensors[0], [None if axis == sharded else each for axis, each in enumerate(shape)])]


@spec("EnsureShape", linear=_MOVES, make=_ensure)
def _ensure_shape(known: Extents, node: Node) -> Factors | None:
    labels = labels_of(known.dims(node.inputs[0]))
    return None if labels is None else Factors([labels], [labels])


def _pad(known: Extents, node: Node) -> Factors | None:
    paddings = node.inputs[1].constant()
    if paddings is None:
        return None
    padded = [axis for axis, each in enumerate(paddings) if np.any(each)]
    labels = labels_of(known.dims(node.inputs[0]), padded)
    if labels is None:
        return None
    result = "".join(each if each.islower() else NEW for each in labels)
    return Factors([labels, *[None] * (len(node.inputs) - 1)], [result])


spec("Pad", "PadV2")(_pad)
spec("MirrorPad", "MirrorPadGrad", never_empty=True)(_pad)


numbers("Squeeze", "ExpandDims", "EnsureShape")(reshaped)


@numbers("Pack")
def _packed_numbers(known: Extents, node: Node) -> Numbers | None:
    entries = complete(known.number(each) if each.rank == 0 else None for each in node.inputs)
    return None if entries is None else Numbers(entries)


@numbers("Unpack")
def _unpacked_numbers(known: Extents, node: Node) -> list[Numbers | None] | None:
    operand = known.numbers(node.inputs[0])
    return None if operand is None else [Numbers([each], True) for each in operand.entries]
