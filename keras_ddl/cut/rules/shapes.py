"""Operations that change a shape and no entry: a shard of rows continues along another axis."""

from __future__ import annotations

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.context import Context
from keras_ddl.cut.dims import Dim, complete, product
from keras_ddl.cut.extents import MOST_VALUES, Dims, Extents, Numbers, ResultExtents, extents, numbers, reshaped
from keras_ddl.cut.local_shapes import Scalar
from keras_ddl.cut.placements import REPLICATED, Made, Partial, Replicated, Sharded
from keras_ddl.cut.program import SHAPE_OPS, Node
from keras_ddl.cut.propagation import sharded_only
from keras_ddl.cut.registry import rule


@rule(*SHAPE_OPS)
def shape(b: Context, node: Node) -> Made | None:
    """The shape of the global tensor, of which the rank's tensor tells all but the extent of the sharded axis."""
    shapes = complete(map(b.dims, node.inputs))
    if shapes is None:
        return None
    result = []
    for dims, output in zip(shapes, node.outputs):
        if node.type == "Rank":
            entries = b.scalar(len(dims), output.dtype)
        elif node.type == "Size":
            entries = b.scalar(product(dims), output.dtype)
        else:
            entries = b.vector(dims, output.dtype)
        result.append((entries, REPLICATED))
    return result


@numbers("Shape", "ShapeN")
def _shape_numbers(known: Extents, node: Node) -> list[Numbers | None]:
    shapes = [known.dims(each) for each in node.inputs]
    return [None if each is None else Numbers(each) for each in shapes]


@numbers("Size")
def _size(known: Extents, node: Node) -> Numbers | None:
    size = known.size(node.inputs[0])
    return None if size is None else Numbers([size], True)


@rule("Reshape")
def reshape(b: Context, node: Node) -> Made | None:
    value, wanted = node.inputs
    placement = b.placement(value)
    if not isinstance(b.placement(wanted), Replicated):
        return None
    if isinstance(placement, Partial):
        return [(b.make(node, [b.local(value), b.replicated(wanted)])[0], placement)]
    before, after = b.dims(value), b.dims(node.outputs[0])
    if before is None or after is None or not isinstance(placement, Sharded):
        return None
    result = placement_after(before, after, placement, b.rows)
    # In a batch of one row, any extent is a unit.
    if result is None or _is_named_by(result.unit, node.outputs[0].key):
        return None
    shape = _global_shape(b, before, after, node)
    shape[result.axis] = b.local_extent(result)
    return [(tf.reshape(b.local(value), b.vector(shape)), result)]


def _global_shape(b: Context, before: Dims, after: Dims, node: Node) -> list[Scalar]:
    """Returns the shape of the global tensor that a Reshape gives."""
    key, wanted = node.outputs[0].key, None
    shape: list[Scalar] = []
    for axis, extent in enumerate(after):
        if _is_named_by(extent, key):  # only the operand tells, perhaps by -1
            wanted = tf.cast(b.replicated(node.inputs[1]), tf.int64)
            shape.append(wanted[axis])
        else:
            shape.append(b.number(extent))
    if wanted is not None:
        # A rank without rows could not tell what -1 stands for: it has no entries to divide.
        others = tf.reduce_prod(tf.abs(tf.stack([tf.cast(each, tf.int64) for each in shape])))
        entries = tf.reduce_prod(tf.stack([tf.cast(b.number(each), tf.int64) for each in before]))
        inferred = entries // tf.maximum(others, 1)
        shape = [each if isinstance(each, int) else tf.where(each < 0, inferred, each) for each in shape]
    return shape


def _is_named_by(extent: Dim, key: str) -> bool:
    """Whether an extent is known by nothing but a tensor that is yet to be built."""
    return any(each.operands and each.operands[0] == key for each in extent.leaves())


def placement_after(before: Dims, after: Dims, placement: Sharded, rows: Dim) -> Sharded | None:
    """Returns how a tensor is sharded after a Reshape, or None where a rank's entries are no shard along one axis.

    The entries of a tensor of extents `before`, seen as [front, rows, back], keep their order. They are the rows of
    axis k after it if the product of the extents before k, times blocks, is `front`.
    """
    front = product(before[: placement.axis]) * placement.blocks
    passed = Dim(1)
    for axis, extent in enumerate(after):
        blocks = front.divided_by(passed)
        if blocks is None:
            return None
        unit = extent.divided_by(blocks * rows)
        if unit is not None:
            return Sharded(axis, blocks, unit)
        passed = passed * extent
    return None


@extents("Reshape")
def _reshape_extents(known: Extents, node: Node) -> ResultExtents:
    wanted = known.numbers(node.inputs[1])
    if wanted is None:
        return [None]
    # An entry of which nothing is known may also be -1: then nothing follows from it.
    total = known.size(node.inputs[0])
    open_entries = [each for each in wanted.entries if not each.is_extent]
    rest = None
    if open_entries == [Dim(-1)] and total is not None:
        rest = total.divided_by(product(each for each in wanted.entries if each.is_extent))
    return [[each if each.is_extent else rest for each in wanted.entries]]


@numbers("Reshape")
def _reshape_numbers(known: Extents, node: Node) -> Numbers | None:
    operand, rank = node.inputs[0], node.outputs[0].rank
    if operand.rank in (0, 1) or rank not in (0, 1) or not operand.dtype.is_integer:
        return reshaped(known, node)
    constant = operand.constant()
    if constant is None or constant.size > MOST_VALUES:
        return None
    return Numbers(constant.ravel().tolist(), rank == 0)


@rule("Fill", "BroadcastTo", of_replicated=True)
def filled(b: Context, node: Node) -> Made:
    """Shards of what is filled with one value need no global tensor."""
    made = b.make_replicated(node)
    value, after = node.inputs[1 if node.type == "Fill" else 0], b.dims(node.outputs[0])
    known = b.dims(value)
    if after is None or known is None or node.after:
        return made

    def materializer(placement: Sharded) -> tf.Tensor | None:
        axis = placement.axis - (len(after) - len(known))
        if node.type == "BroadcastTo" and axis >= 0 and known[axis] != 1:
            return None
        return tf.broadcast_to(b.replicated(value), b.local_shape(after, placement))

    b.register_materializer(node.outputs[0], sharded_only(materializer))
    return made


@extents("Fill")
def _filled_extents(known: Extents, node: Node) -> ResultExtents:
    shape = known.numbers(node.inputs[0])
    return [None if shape is None or any(each == -1 for each in shape.entries) else shape.entries]


@numbers("Fill")
def _filled_numbers(known: Extents, node: Node) -> Numbers | None:
    length, entry = known.constants(node.inputs[0]), known.number(node.inputs[1])
    if entry is None or length is None or len(length) != 1 or length[0] > MOST_VALUES:
        return None
    return Numbers([entry] * length[0])
