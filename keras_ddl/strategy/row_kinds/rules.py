"""The rules: what an operation makes of the kinds of its inputs.

Each is called with the reader, the operation, the output in question, the inputs, and their kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from keras_ddl.compat import tensorflow as tf_compat
from keras_ddl.compat.tensorflow import tf
from keras_ddl.strategy.row_kinds.dimensions import goes_along, is_zero, labels_of, moved_axis, takes_some
from keras_ddl.strategy.row_kinds.kinds import (
    AGGREGATES,
    COUNT,
    FUNCTION,
    IN_LIST,
    INDEPENDENT,
    OPAQUE,
    ROWS,
    SUM,
    Kind,
    comparing,
)
from keras_ddl.strategy.row_kinds.operations import (
    ALONG_LAST,
    CALLS,
    FLOW,
    LINEAR_IN_FIRST,
    PRODUCTS,
    QUOTIENTS,
    REDUCTIONS,
    SAME,
    SOME_ROWS,
    SUMS_OF_INPUTS,
    in_layer,
    key_of,
)

if TYPE_CHECKING:
    from keras_ddl.strategy.row_kinds import RowKinds


def _default(reader: RowKinds, operation: Any, output: Any, inputs: Sequence[Any], kinds: Sequence[Kind]) -> Kind:
    rows = [kind for kind in kinds if kind.name == "rows"]
    if not rows:
        if any(kind.name == "opaque" for kind in kinds):
            return OPAQUE
        if all(kind.name in ("independent", "shape") for kind in kinds):
            return _of_shape(reader, output)
        if operation.type in ("Range", "LinSpace", "OneHot", "Fill") and reader.could_be_rows(output):
            return ROWS  # a number for each row
        return FUNCTION
    axis = _axis(reader, operation, output, rows)
    if axis is None:
        return OPAQUE
    compared = operation.type == "RandomShuffle"
    mixed = False
    if operation.type not in FLOW and output.dtype != tf.variant:
        apart = any(kind.axis != rows[0].axis for kind in rows if kind.axis != IN_LIST)
        compared = compared or (apart and not in_layer(operation))
        # A layer of Keras may look at its rows (normalisation, masks): what it makes of them is its own affair.
        mixed = any(kind.name in AGGREGATES for kind in kinds) and not in_layer(operation)
    mixed = mixed or compared
    whole = all(kind.whole for kind in rows) and operation.type not in SOME_ROWS
    return Kind("rows", axis=axis, power=rows[0].power, whole=whole, mixed=mixed, compared=compared)


def _axis(reader: RowKinds, operation: Any, output: Any, rows: Sequence[Kind]) -> int | None:
    """Returns where rows that went into an operation lie in its output; None if there is no room for them."""
    if output.dtype == tf.variant:
        return IN_LIST
    if output.shape.rank is None:
        return max(rows[0].axis, 0)
    # Lists are over time: what comes out of one has the rows behind it.
    room = [axis for axis in range(output.shape.rank) if reader.could_be_rows(output, axis)]
    if operation.type == "TensorListStack" and 1 in room:
        return 1
    wanted = [kind.axis for kind in rows if kind.axis in room]
    return wanted[0] if wanted else next(iter(room), None)


def _of_shape(reader: RowKinds, output: Any) -> Kind:
    """What has a shape that contains the number of rows: ones, zeros, a range, random numbers."""
    return ROWS if output.shape.rank != 0 and reader.could_be_rows(output) else COUNT


def _same(reader: RowKinds, operation: Any, output: Any, inputs: Sequence[Any], kinds: Sequence[Kind]) -> Kind:
    return kinds[output.value_index] if operation.type == "IdentityN" else kinds[0]


def _reduction(reader: RowKinds, operation: Any, output: Any, inputs: Sequence[Any], kinds: Sequence[Kind]) -> Kind:
    kind = kinds[0]
    if kind.name == "shape":
        if operation.type != "Prod":
            return FUNCTION
        return COUNT if kind.whole else SUM
    if kind.name != "rows":
        return kind if operation.type in ("Sum", "Mean") else FUNCTION if kind.name != "opaque" else OPAQUE
    rank = inputs[0].shape.rank
    axes = tf.get_static_value(inputs[1])
    if axes is None or rank is None:
        return _default(reader, operation, output, inputs, kinds)
    axes = sorted(int(each) % rank for each in axes.ravel()) if rank else []
    if kind.axis not in axes:
        shift = 0 if operation.get_attr("keep_dims") else sum(each < kind.axis for each in axes)
        return replace(kind, axis=kind.axis - shift)
    if operation.type == "Sum":
        return Kind("total", power=kind.power, mixed=kind.mixed)
    if operation.type == "Mean":
        return Kind("total", power=kind.power - 1, mixed=kind.mixed) if kind.whole else Kind("mean")
    if operation.type in ("Max", "Min") and not kind.power:
        return Kind(operation.type.lower())
    return OPAQUE


def _sum_of_inputs(reader: RowKinds, operation: Any, output: Any, inputs: Sequence[Any], kinds: Sequence[Kind]) -> Kind:
    if operation.type == "Sub" and kinds[0].splits and tf_compat.constant_value(inputs[1]) == 1:
        return COUNT
    counts = [i for i, kind in enumerate(kinds) if kind.name == "count"]
    others = [kind for kind in kinds if kind.name not in ("count", "independent")]
    if operation.type == "Pack" and output.dtype.is_integer and counts and not others:
        return Kind("shape", axis=counts[0])
    if any(kind.name == "shape" for kind in kinds):
        return next(kind for kind in kinds if kind.name == "shape")
    if any(kind.name == "rows" for kind in kinds):
        kind = _default(reader, operation, output, inputs, kinds)
        axis = next(each.axis for each in kinds if each.name == "rows")
        if operation.type == "Pack" and operation.get_attr("axis") <= axis:
            return replace(kind, name="rows", axis=axis + 1)
        return kind
    if operation.type in ("Select", "SelectV2"):
        if kinds[0] != INDEPENDENT:
            return FUNCTION
        inputs, kinds = inputs[1:], kinds[1:]
    kinds = [kind for each, kind in zip(inputs, kinds) if kind != INDEPENDENT or not is_zero(each)]
    if all(kind == kinds[0] for kind in kinds):
        return kinds[0]
    if all(kind == INDEPENDENT or kind.is_mean for kind in kinds):
        return next(kind for kind in kinds if kind.is_mean)  # both are weighed by the share of the rows
    return OPAQUE if any(kind.name == "opaque" for kind in kinds) else FUNCTION


def _product(reader: RowKinds, operation: Any, output: Any, inputs: Sequence[Any], kinds: Sequence[Kind]) -> Kind:
    rows = [kind for kind in kinds if kind.name == "rows"]
    counts = [kind for kind in kinds if kind.name == "count"]
    if operation.type in ("Mul", "MulNoNan") and len(kinds) == 2:
        return _scaled(reader, operation, output, inputs, kinds, 1)
    if len(rows) == 2:
        return _contraction(reader, operation, output, inputs, kinds)
    if not rows and not counts and INDEPENDENT in kinds:
        return next(kind for kind in kinds if kind != INDEPENDENT)
    return _default(reader, operation, output, inputs, kinds)


def _quotient(reader: RowKinds, operation: Any, output: Any, inputs: Sequence[Any], kinds: Sequence[Kind]) -> Kind:
    return _scaled(reader, operation, output, inputs, kinds, -1)


def _scaled(
    reader: RowKinds, operation: Any, output: Any, inputs: Sequence[Any], kinds: Sequence[Kind], sign: int
) -> Kind:
    """A product (sign 1) or quotient (-1) of two: powers of the number of rows multiply."""
    first, second = kinds
    if sign == 1 and (first.name == "count" or first == INDEPENDENT):
        first, second = second, first
        inputs = inputs[::-1]
    if second == INDEPENDENT:
        if first.name == "total" and sign == -1 and _divides_by_rows(reader, inputs):
            return replace(first, power=first.power - 1)
        return first if first.name != "shape" else _of_shape(reader, output)
    if second.name == "count" and first.name in ("rows", "total", "count"):
        return replace(first, power=first.power + sign * second.power)
    if second.name == "count" and first == INDEPENDENT:
        return replace(second, power=sign * second.power)
    return _default(reader, operation, output, inputs, kinds)


def _divides_by_rows(reader: RowKinds, inputs: Sequence[Any]) -> bool:
    """Whether a total is divided by a constant that is the static number of the rows, or of all it sums up."""
    total, divisor = inputs
    value = tf_compat.constant_value(divisor)
    if reader.static_rows is None or value is None or value.ndim:
        return False
    while total.op.type in SAME:
        total = total.op.inputs[0]
    elements = None
    if total.op.type == "Sum":
        elements = total.op.inputs[0].shape.num_elements()
    from_shape = divisor.op.type == "Cast" or tf_compat.constant_value(divisor) is None
    return value == reader.static_rows or (value == elements and from_shape)


def _contraction(reader: RowKinds, operation: Any, output: Any, inputs: Sequence[Any], kinds: Sequence[Kind]) -> Kind:
    """A product of two tensors of rows that sums over a dimension: over the rows themselves, or inside each."""
    labels = labels_of(operation, inputs)
    if labels is None:
        return _default(reader, operation, output, inputs, kinds)
    of_rows = {label[kind.axis] for label, kind in zip(labels[0], kinds)}
    kept = [labels[1].index(each) for each in of_rows if each in labels[1]]
    whole, mixed = all(kind.whole for kind in kinds), any(kind.mixed for kind in kinds)
    if not kept:
        return Kind("total", power=sum(kind.power for kind in kinds), mixed=mixed)
    kind = Kind("rows", axis=min(kept), power=kinds[0].power, whole=whole, mixed=mixed)
    return comparing(kind, len(of_rows) > 1 and not in_layer(operation))  # every row with every other


def _first(reader: RowKinds, operation: Any, output: Any, inputs: Sequence[Any], kinds: Sequence[Kind]) -> Kind:
    first = kinds[0]
    if first.name == "shape" and operation.type in ("StridedSlice", "GatherV2"):
        return _element(reader, operation, output, inputs, first)
    if first.name in AGGREGATES and all(kind == INDEPENDENT for kind in kinds[1:]):
        return first
    if first.name != "rows":
        return _default(reader, operation, output, inputs, kinds)
    axis = moved_axis(operation, inputs, output, first.axis)
    if axis is None or not reader.could_be_rows(output, axis):
        return _default(reader, operation, output, inputs, kinds)
    if operation.type in ("Cumsum", "Reverse", "ReverseV2"):
        return comparing(first, goes_along(inputs, first.axis))
    if operation.type not in ("Slice", "StridedSlice", "GatherV2") or not takes_some(operation, inputs, first.axis):
        return replace(first, axis=axis)
    by_position = _takes_by_position(reader, operation, inputs, kinds, first.axis)
    return comparing(replace(first, axis=axis, whole=False), by_position)


def _takes_by_position(
    reader: RowKinds, operation: Any, inputs: Sequence[Any], kinds: Sequence[Kind], axis: int
) -> bool:
    """Whether some of the rows are taken for where they lie, which for a rank's rows is elsewhere: `rows[1:]`, but
    not `rows[:count]` of several batches one after another, nor rows that were looked for.
    """
    if operation.type == "GatherV2":
        return kinds[1].whole or kinds[1].mixed
    if operation.type == "StridedSlice" and tf.get_static_value(inputs[3]) is None:
        return True
    if operation.type == "StridedSlice" and tf.get_static_value(inputs[3])[axis] != 1:
        return True
    ends = (0, -1) if operation.type == "Slice" else (0,)
    return not all(_counts_rows(reader, each, kind, axis, ends) for each, kind in zip(inputs[1:3], kinds[1:3]))


def _counts_rows(reader: RowKinds, bounds: Any, kind: Kind, axis: int, ends: Sequence[int]) -> bool:
    """Whether a bound of a slice is nothing, the end, or a multiple of the number of rows."""
    if kind.name == "shape":
        return kind.axis == axis and kind.whole
    bound = tf_compat.constant_value(bounds)
    if kind != INDEPENDENT or bound is None:
        return False
    return bound[axis] in ends or (reader.static_rows is not None and bound[axis] % reader.static_rows == 0)


def _along_an_axis(reader: RowKinds, operation: Any, output: Any, inputs: Sequence[Any], kinds: Sequence[Kind]) -> Kind:
    """What compares the elements along a dimension: a softmax, a sort, a cumulative product, a shift."""
    kind = _default(reader, operation, output, inputs, kinds)
    first = kinds[0]
    if kind.name != "rows" or first.name != "rows":
        return kind
    rank = inputs[0].shape.rank
    if operation.type in ALONG_LAST:
        along = rank is None or first.axis == rank - 1
    else:
        along = goes_along(inputs[:1] + inputs[-1:], first.axis)
    return comparing(kind, along)


def _split(reader: RowKinds, operation: Any, output: Any, inputs: Sequence[Any], kinds: Sequence[Kind]) -> Kind:
    """Pieces of a tensor. Along the rows: the batches that were put one after another, or some rows by position."""
    split_v = operation.type == "SplitV"
    value, at = (0, 2) if split_v else (1, 0)
    kind = kinds[value]
    if kind.name in AGGREGATES:
        return kind
    axis = tf.get_static_value(inputs[at])
    if kind.name != "rows" or axis is None or inputs[value].shape.rank is None:
        return _default(reader, operation, output, inputs, kinds)
    if int(axis) % inputs[value].shape.rank != kind.axis:
        return kind
    return (
        kind
        if not split_v and operation.get_attr("num_split") == _batches_in(reader, inputs[value])
        else (comparing(replace(kind, whole=False), True))
    )


def _batches_in(reader: RowKinds, tensor: Any) -> int:
    """How many batches of rows have been put one after another to make a tensor."""
    while reader.of(tensor).name == "rows":
        parts = [each for each in tensor.op.inputs if reader.of(each).name == "rows"]
        if tensor.op.type == "ConcatV2" and tf.get_static_value(tensor.op.inputs[-1]) == reader.of(tensor).axis:
            return sum(_batches_in(reader, each) for each in parts)
        if not parts:
            return 1
        tensor = parts[0]
    return 1


def _best(reader: RowKinds, operation: Any, output: Any, inputs: Sequence[Any], kinds: Sequence[Kind]) -> Kind:
    """The position of the largest."""
    if kinds[0].name != "rows":
        return _default(reader, operation, output, inputs, kinds)
    if goes_along(inputs, kinds[0].axis):
        return OPAQUE
    at = int(tf.get_static_value(inputs[1])) % inputs[0].shape.rank
    return replace(kinds[0], axis=kinds[0].axis - (at < kinds[0].axis), power=0)


def _squares(reader: RowKinds, operation: Any, output: Any, inputs: Sequence[Any], kinds: Sequence[Kind]) -> Kind:
    if kinds[0].name != "rows" or kinds[0].power:
        return _default(reader, operation, output, inputs, kinds)
    return replace(SUM, mixed=kinds[0].mixed)


def _segments(reader: RowKinds, operation: Any, output: Any, inputs: Sequence[Any], kinds: Sequence[Kind]) -> Kind:
    """Rows put into a fixed number of groups, which all ranks have alike."""
    values, groups, number = kinds[0], kinds[1], kinds[-1]
    along = all(kind.name == "rows" and kind.axis == 0 for kind in (values, groups) if kind != INDEPENDENT)
    if number != INDEPENDENT or not along:
        return _default(reader, operation, output, inputs, kinds)
    mixed = any(kind.mixed for kind in kinds)
    if operation.type == "UnsortedSegmentSum":
        return Kind("total", power=values.power, mixed=mixed)
    return Kind("max" if operation.type == "UnsortedSegmentMax" else "min", mixed=mixed)


def _element(reader: RowKinds, operation: Any, output: Any, inputs: Sequence[Any], shape: Kind) -> Kind:
    index = tf.get_static_value(inputs[1])
    if index is not None and not index.size:
        return INDEPENDENT
    if index is None or output.shape.rank != 0:
        return replace(shape, axis=0) if index is None or int(index.ravel()[0]) == 0 else INDEPENDENT
    rank = inputs[0].shape.num_elements()
    position = int(index.ravel()[0])
    position += rank if position < 0 and rank else 0
    if position != shape.axis:
        return INDEPENDENT
    if shape.splits:
        return replace(COUNT, splits=True)
    return COUNT if shape.whole else SUM


def _shape(reader: RowKinds, operation: Any, output: Any, inputs: Sequence[Any], kinds: Sequence[Kind]) -> Kind:
    kind = kinds[0]
    if kind.name != "rows":
        return INDEPENDENT
    if operation.type == "Size":
        return COUNT if kind.whole else SUM
    return Kind("shape", axis=kind.axis, whole=kind.whole, splits=kind.splits)


def _maximum(reader: RowKinds, operation: Any, output: Any, inputs: Sequence[Any], kinds: Sequence[Kind]) -> Kind:
    if sorted(kind.name for kind in kinds) == ["count", "independent"]:
        return next(kind for kind in kinds if kind.name == "count")  # at least one row, to divide by
    return _default(reader, operation, output, inputs, kinds)


def _call(reader: RowKinds, operation: Any, output: Any, inputs: Sequence[Any], kinds: Sequence[Kind]) -> Kind:
    graph = tf_compat.called_graph(operation)
    if graph is None or len(graph.inputs) != len(operation.inputs):
        return _default(reader, operation, output, inputs, kinds)
    inside = reader.inside_function()
    known = {key_of(each): kind for each, kind in zip(inputs, kinds)}
    for placeholder, given in zip(graph.inputs, operation.inputs):
        inside.mark(placeholder, known.get(key_of(given), INDEPENDENT))
    return inside.of(graph.outputs[output.value_index])


_Rule = Callable[["RowKinds", Any, Any, Sequence[Any], Sequence[Kind]], Kind]


def rule_of(operation_type: str) -> _Rule:
    for types, rule in _RULES:
        if operation_type in types:
            return rule
    return _default


_RULES: list[tuple[frozenset[str], _Rule]] = [
    (SAME, _same),
    (REDUCTIONS, _reduction),
    (SUMS_OF_INPUTS, _sum_of_inputs),
    (PRODUCTS, _product),
    (QUOTIENTS, _quotient),
    (LINEAR_IN_FIRST, _first),
    (frozenset(("Split", "SplitV")), _split),
    (frozenset(("Shape", "ShapeN", "Size")), _shape),
    (frozenset(("Maximum",)), _maximum),
    (ALONG_LAST | {"Cumprod", "CumulativeLogsumexp", "Roll"}, _along_an_axis),
    (frozenset(("ArgMax", "ArgMin")), _best),
    (frozenset(("L2Loss",)), _squares),
    (frozenset(("UnsortedSegmentSum", "UnsortedSegmentMax", "UnsortedSegmentMin")), _segments),
    (CALLS, _call),
]
