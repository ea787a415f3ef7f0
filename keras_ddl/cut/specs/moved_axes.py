"""Specs of operations that only move entries. Partial values stay partial, for any operation that combines them."""

from __future__ import annotations

import numpy as np

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.analysis.dims import Dim, Uncertain, certain
from keras_ddl.cut.analysis.extents import Dims, Extents, ResultNumbers, numbers, reshaped
from keras_ddl.cut.analysis.program import Node
from keras_ddl.cut.operations.context import Context
from keras_ddl.cut.operations.factors import NEW, Factors, Linear, LocalOperands, ShapeOf, labels_of, spec, without

_MOVES = Linear(at=(0,), moves=True)


@spec("Transpose", "ConjugateTranspose", linear=_MOVES)
def _transpose(known: Extents, node: Node) -> Factors:
    order, labels = known.constants(node.inputs[1]), labels_of(known.dims(node.inputs[0]))
    return Factors([labels, None], ["".join(labels[axis] for axis in order)])


@spec("ExpandDims", linear=_MOVES)
def _expand_dims(known: Extents, node: Node) -> Factors:
    axis, labels = known.constants(node.inputs[1]), labels_of(known.dims(node.inputs[0]))
    at = axis[0] % (len(labels) + 1)
    return Factors([labels, None], [labels[:at] + "1" + labels[at:]])


@spec("Roll", linear=_MOVES)
def _roll(known: Extents, node: Node) -> Factors:
    labels = labels_of(known.dims(node.inputs[0]), known.constants(node.inputs[2]))
    return Factors([labels, None, None], [labels])


@spec("ReverseSequence", linear=_MOVES)
def _reverse_sequence(known: Extents, node: Node) -> Factors:
    labels = labels_of(known.dims(node.inputs[0]), [node.attr("seq_dim", int)])
    return Factors([labels, labels[node.attr("batch_dim", int)]], [labels])


def _squeezed_axes(dims: Dims, node: Node) -> list[int]:
    """Returns the axes that a Squeeze removes from a tensor of extents `dims`."""
    named = [axis % len(dims) for axis in node.attr("squeeze_dims", list)]
    return named or [axis for axis, each in enumerate(dims) if certain(each.number) == 1]


def _make_squeeze(b: Context, node: Node, local: LocalOperands) -> list[tf.Tensor]:
    # The axes are explicit, because a rank may have one row of a batch that has more.
    axes = _squeezed_axes(b.dims(node.inputs[0]), node)
    return [tf.squeeze(local.tensors[0], axes) if axes else tf.identity(local.tensors[0])]


@spec("Squeeze", linear=_MOVES, make=_make_squeeze)
def _squeeze(known: Extents, node: Node) -> Factors:
    dims = known.dims(node.inputs[0])
    labels = labels_of(dims)
    return Factors([labels], [without(labels, _squeezed_axes(dims, node))])


@spec("BroadcastTo")
def _broadcast_to(known: Extents, node: Node) -> Factors:
    dims, shape = known.dims(node.inputs[0]), known.numbers(node.inputs[1])
    skipped = len(shape) - len(dims)
    if skipped < 0 or any(each == -1 for each in shape):  # -1 means that the extent is not given
        raise Uncertain
    unsure = [axis + skipped for axis, (own, entry) in enumerate(zip(dims, shape[skipped:])) if own not in (entry, 1)]
    result = labels_of(shape, unsure)
    pairs = zip(dims, shape[skipped:], result[skipped:])
    operand = "".join("1" if own == 1 and entry != 1 else label for own, entry, label in pairs)
    return Factors([operand, ShapeOf(result)], [result])


@spec("Pack", linear=Linear(together=True, moves=True))
def _pack(known: Extents, node: Node) -> Factors:
    labels = labels_of(known.dims(node.inputs[0]))
    axis = node.attr("axis", int) % (len(labels) + 1)
    return Factors([labels] * len(node.inputs), [labels[:axis] + NEW + labels[axis:]], new=Dim(len(node.inputs)))


@spec("Unpack", linear=_MOVES)
def _unpack(known: Extents, node: Node) -> Factors:
    labels = labels_of(known.dims(node.inputs[0]), [node.attr("axis", int)])
    return Factors([labels], ["".join(each for each in labels if each.islower())] * len(node.outputs))


def _ensure(b: Context, node: Node, local: LocalOperands) -> list[tf.Tensor]:
    shape = node.outputs[0].shape.as_list()
    # The declared extent is that of the global axis, which tracing has already checked.
    sharded = local.factors.results[0].find(local.label or " ")
    return [tf.ensure_shape(local.tensors[0], [None if axis == sharded else each for axis, each in enumerate(shape)])]


@spec("EnsureShape", linear=_MOVES, make=_ensure)
def _ensure_shape(known: Extents, node: Node) -> Factors:
    labels = labels_of(known.dims(node.inputs[0]))
    return Factors([labels], [labels])


def _pad(known: Extents, node: Node) -> Factors:
    padded = [axis for axis, each in enumerate(certain(node.inputs[1].constant())) if np.any(each)]
    labels = labels_of(known.dims(node.inputs[0]), padded)
    result = "".join(each if each.islower() else NEW for each in labels)
    return Factors([labels, *[None] * (len(node.inputs) - 1)], [result])


spec("Pad", "PadV2")(_pad)
spec("MirrorPad", "MirrorPadGrad", never_empty=True)(_pad)


numbers("Squeeze", "ExpandDims", "EnsureShape")(reshaped)


@numbers("Pack")
def _packed_numbers(known: Extents, node: Node) -> ResultNumbers:
    if any(each.rank != 0 for each in node.inputs):
        raise Uncertain
    return [[known.number(each) for each in node.inputs]]


@numbers("Unpack")
def _unpacked_numbers(known: Extents, node: Node) -> ResultNumbers:
    return [[each] for each in known.numbers(node.inputs[0])]
