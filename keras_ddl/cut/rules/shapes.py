"""Rules for operations that change only shapes: a shard of rows may continue along another axis."""

from __future__ import annotations

from dataclasses import replace

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.analysis.attributes import AttrValue
from keras_ddl.cut.analysis.dims import Dim, Uncertain, certain, if_certain, product
from keras_ddl.cut.analysis.extents import (
    MOST_VALUES,
    Dims,
    Extents,
    ResultExtents,
    ResultNumbers,
    extents,
    numbers,
    reshaped,
)
from keras_ddl.cut.analysis.placements import REPLICATED, Partial, PlacedOutputs, Sharded
from keras_ddl.cut.analysis.program import SHAPE_OPS, Node, Value
from keras_ddl.cut.operations.context import Context
from keras_ddl.cut.operations.propagation import sharded_only
from keras_ddl.cut.operations.registry import rule
from keras_ddl.cut.values.local_shapes import Scalar

_INT64 = AttrValue(type=tf.int64.as_datatype_enum)


@rule(*SHAPE_OPS)
def shape(b: Context, node: Node) -> PlacedOutputs:
    """Builds the shape of the global tensor; the rank's tensor shows all extents except along the sharded axis."""
    result = []
    for dims, output in zip([b.dims(each) for each in node.inputs], node.outputs):
        if node.type == "Rank":
            entries = b.scalar(len(dims), output.dtype)
        elif node.type == "Size":
            entries = b.scalar(product(dims), output.dtype)
        else:
            entries = b.vector(dims, output.dtype)
        result.append((entries, REPLICATED))
    return result


@numbers("Shape", "ShapeN")
def _shape_numbers(known: Extents, node: Node) -> ResultNumbers:
    return [if_certain(known.dims, each) for each in node.inputs]


@numbers("Size")
def _size(known: Extents, node: Node) -> ResultNumbers:
    return [[known.size(node.inputs[0])]]


@rule("Reshape")
def reshape(b: Context, node: Node) -> PlacedOutputs | None:
    value, shape_operand = node.inputs
    placement = b.placement(value)
    if b.placement(shape_operand) != REPLICATED:
        return None
    if isinstance(placement, Partial):
        b.mark_linear(node)
        return [(b.make(node, [b.local(value), b.replicated(shape_operand)])[0], placement)]
    if not isinstance(placement, Sharded):
        return None
    before, after = b.dims(value), b.dims(node.outputs[0])
    result = placement_after(before, after, placement, b.rows_of(placement))
    # With one row, every extent is a multiple of the rows, which proves nothing.
    if _is_named_by(result.unit, b.extents.name_of(node.outputs[0])):
        return None
    shape = _global_shape(b, before, after, node)
    shape[result.axis] = b.local_extent(result)
    made = b.make(node, [b.local(value), b.vector(shape, tf.int64)], Tshape=_INT64)[0]
    made.set_shape([each if isinstance(each, int) else None for each in shape])
    return [(made, result)]


def _global_shape(b: Context, before: Dims, after: Dims, node: Node) -> list[Scalar]:
    """Returns the shape of the global tensor that a Reshape produces."""
    key, requested = b.extents.name_of(node.outputs[0]), None
    shape: list[Scalar] = []
    for axis, extent in enumerate(after):
        if _is_named_by(extent, key):  # only the shape operand has it, perhaps as -1
            requested = tf.cast(b.replicated(node.inputs[1]), tf.int64)
            shape.append(requested[axis])
        else:
            shape.append(b.number(extent))
    if requested is not None:
        # A rank without rows could not resolve -1, because it has no entries to divide.
        others = tf.reduce_prod(tf.abs(tf.stack([tf.cast(each, tf.int64) for each in shape])))
        entries = tf.reduce_prod(tf.stack([tf.cast(b.number(each), tf.int64) for each in before]))
        inferred = entries // tf.maximum(others, 1)
        shape = [each if isinstance(each, int) else tf.where(each < 0, inferred, each) for each in shape]
    return shape


def _is_named_by(extent: Dim, key: str) -> bool:
    """Whether an extent is known only through a tensor that is not built yet."""
    return any(each.operands and each.operands[0] == key for each in extent.leaves())


def placement_after(before: Dims, after: Dims, placement: Sharded, rows: Dim) -> Sharded:
    """Returns how a tensor is sharded after a Reshape. Raises: Uncertain: no axis certainly has the shard.

    The entries of a tensor of extents `before`, seen as [front, rows, back], keep their order. They are the rows of
    axis k after it if the product of the extents before k, times blocks, is `front`. `rows`: the rows of a block.
    """
    front = product(before[: placement.axis]) * placement.blocks
    passed = Dim(1)
    for axis, extent in enumerate(after):
        blocks = certain(front.divided_by(passed))
        unit = extent.divided_by(blocks * rows)
        if unit is not None:
            return replace(placement, axis=axis, blocks=blocks, unit=unit)
        passed = passed * extent
    raise Uncertain


@extents("Reshape")
def _reshape_extents(known: Extents, node: Node) -> ResultExtents:
    requested = known.numbers(node.inputs[1])
    # An unknown entry may also be -1, so nothing follows from it.
    total = if_certain(known.size, node.inputs[0])
    rest = None
    if total is not None and [each for each in requested if not each.is_extent] == [Dim(-1)]:
        rest = total.divided_by(product(each for each in requested if each.is_extent))
    return [[each if each.is_extent else rest for each in requested]]


@numbers("Reshape")
def _reshape_numbers(known: Extents, node: Node) -> ResultNumbers:
    if node.inputs[0].rank in (0, 1):
        return reshaped(known, node)
    in_turn = if_certain(_in_turn, known, node.inputs[0])
    if in_turn is not None:
        return [in_turn]
    constant = certain(node.inputs[0].constant())
    if constant.size > MOST_VALUES:
        raise Uncertain
    return [constant.ravel().tolist()]


def _in_turn(known: Extents, value: Value) -> list[Dim]:
    """Returns the entries of vectors that are packed and transposed, as in the gradient of a Tile."""
    transposed = value.source().node
    if transposed.type != "Transpose" or known.constants(transposed.inputs[1]) != [1, 0]:
        raise Uncertain
    packed = transposed.inputs[0].source().node
    if packed.type != "Pack" or packed.attr("axis", int) != 0:
        raise Uncertain
    vectors = [known.vector(each) for each in packed.inputs]
    return [entry for entries in zip(*vectors, strict=True) for entry in entries]


@rule("Fill", "BroadcastTo", of_replicated=True)
def filled(b: Context, node: Node) -> PlacedOutputs:
    """Builds shards of a tensor that is filled with one value, without the global tensor."""
    made = b.make_replicated(node)
    value = node.inputs[1 if node.type == "Fill" else 0]

    def materializer(placement: Sharded) -> tf.Tensor:
        known, after = b.dims(value), b.dims(node.outputs[0])
        axis = placement.axis - (len(after) - len(known))
        if node.type == "BroadcastTo" and axis >= 0 and known[axis] != 1:
            raise Uncertain
        return tf.broadcast_to(b.replicated(value), b.local_shape(after, placement))

    if not node.after:
        b.register_materializer(node.outputs[0], sharded_only(materializer))
    return made


@extents("Fill")
def _filled_extents(known: Extents, node: Node) -> ResultExtents:
    shape = known.numbers(node.inputs[0])
    return [None if any(each == -1 for each in shape) else shape]


@numbers("Fill")
def _filled_numbers(known: Extents, node: Node) -> ResultNumbers:
    length, entry = known.constants(node.inputs[0]), known.number(node.inputs[1])
    if len(length) != 1 or length[0] > MOST_VALUES:
        raise Uncertain
    return [[entry] * length[0]]
