"""Operations on variables: their types, and functions that build the ones that every step needs for every variable.

These functions skip the argument checks of tf.raw_ops, which would take a tenth of the time of a cut.
"""

from __future__ import annotations

from collections.abc import Sequence

from keras_ddl.compat.tensorflow import create_op, tf

READ = "ReadVariableOp"
ASSIGN, ASSIGN_ADD, ASSIGN_SUB = ASSIGNS = ("AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp")
# Operations that add rows to a variable's rows, subtract rows from them, or replace them.
ROW_UPDATES = ("ResourceScatterAdd", "ResourceScatterSub", "ResourceScatterUpdate")
SCATTER_ADD, SCATTER_SUB, SCATTER_UPDATE = ROW_UPDATES
_OTHERS = ("ResourceScatterMul", "ResourceScatterDiv", "ResourceScatterMin", "ResourceScatterMax")
SCATTERS = (*ROW_UPDATES, *_OTHERS)

_SEEN = "_grappler_ArithmeticOptimizer_AddOpsRewriteStage"  # of TensorFlow 2.21: arithmetic_optimizer.cc
MARKED = {_SEEN: tf.compat.v1.AttrValue(b=True)}  # attributes of additions, see sums_in_order.py


def read(handle: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    return _made(READ, [handle], [dtype], dtype=_type(dtype)).outputs[0]


def assign(handle: tf.Tensor, value: tf.Tensor) -> tf.Operation:
    unchecked = tf.compat.v1.AttrValue(b=False)
    return _made(ASSIGN, [handle, value], [], dtype=_type(value.dtype), validate_shape=unchecked)


def taken(handle: tf.Tensor, dtype: tf.DType, entries: int | None = None) -> tf.Tensor:
    """Returns the value of a variable, a vector, which the variable has no longer. So TensorFlow changes the value in
    the variable's memory, if nobody else has it."""
    value = read(handle, dtype)
    value.set_shape([entries])
    # Its shape is hidden, because TensorFlow compares it with the variable's when it builds the operation.
    nothing = tf.raw_ops.PlaceholderWithDefault(input=tf.zeros([0], dtype), shape=[None])
    with tf.control_dependencies([value.op]):
        emptied = assign(handle, nothing)
    with tf.control_dependencies([emptied]):
        return tf.identity(value)


def replaced(vector: tf.Tensor, begin: tf.Tensor, part: tf.Tensor, *, by_fours: bool = False) -> tf.Tensor:
    """Returns a vector whose entries from `begin` on are `part`; in the same memory, if nobody else has the vector.

    by_fours: `begin` is a multiple of 4, and so is the size of `part`, unless it reaches to the vector's end. This is
    faster.
    """
    dtype = vector.dtype
    wide = _wider(vector) if by_fours else None
    if wide is not None:
        together = wide.size // dtype.size
        vector, part = (tf.bitcast(tf.reshape(each, [-1, together]), wide) for each in (vector, part))
        begin //= together
    end = begin + tf.size(part, begin.dtype)
    updated = tf.raw_ops.TensorStridedSliceUpdate(
        input=vector, begin=[begin], end=[end], strides=tf.constant([1], begin.dtype), value=part
    )
    return updated if wide is None else tf.reshape(tf.bitcast(updated, dtype), [-1])


def _wider(vector: tf.Tensor) -> tf.DType | None:
    """Returns a dtype that holds 2 or 4 entries of the vector, which has a multiple of as many; None: there is none.

    TensorFlow copies a slice number by number, so wide numbers are faster.
    """
    count, size = vector.shape.num_elements(), vector.dtype.size
    if count is None:
        return None
    kinds = [kind for kind in (tf.complex128, tf.int64) if kind.size // size in (2, 4)]
    return next((kind for kind in kinds if count * size % kind.size == 0), None)


def scatter_rows(kind: str, handle: tf.Tensor, places: tf.Tensor, rows: tf.Tensor) -> tf.Operation:
    """Adds rows to those of a variable, subtracts them, or replaces rows, as `kind`, one of ROW_UPDATES, says.

    The variable holds the rows one after the other in a vector. They change in its memory, if nobody else has its
    value. After TensorFlow's operation on variables, every read of the variable would copy it.

    REQUIRES: all places exist; the computation runs on a CPU, because rows of one place must be taken in their order.
    """
    value = taken(handle, rows.dtype)
    own = replaced(value, tf.constant(0, tf.int64), tf.zeros([0], rows.dtype))  # a copy, if somebody has the value
    in_place = {SCATTER_ADD: tf.raw_ops.InplaceAdd, SCATTER_SUB: tf.raw_ops.InplaceSub}
    scatter = in_place.get(kind, tf.raw_ops.InplaceUpdate)
    changed = scatter(x=tf.reshape(own, [-1, rows.shape[1]]), i=tf.cast(places, tf.int32), v=rows)
    return assign(handle, tf.reshape(changed, [-1]))


def sum_of(current: tf.Tensor, added: tf.Tensor) -> tf.Tensor:
    """Returns a variable's value after ASSIGN_ADD."""
    return _made("AddV2", [current, added], [current.dtype], T=_type(current.dtype), **MARKED).outputs[0]


def difference_of(current: tf.Tensor, subtracted: tf.Tensor) -> tf.Tensor:
    """Returns a variable's value after ASSIGN_SUB."""
    return _made("Sub", [current, subtracted], [current.dtype], T=_type(current.dtype)).outputs[0]


def _made(
    kind: str, inputs: Sequence[tf.Tensor], results: Sequence[tf.DType], **attrs: tf.compat.v1.AttrValue
) -> tf.Operation:
    return create_op(tf.compat.v1.get_default_graph(), kind, list(inputs), list(results), attrs=attrs, name=kind)


def _type(dtype: tf.DType) -> tf.compat.v1.AttrValue:
    return tf.compat.v1.AttrValue(type=dtype.as_datatype_enum)
