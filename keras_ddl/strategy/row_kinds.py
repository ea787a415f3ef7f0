"""What a tensor of a traced step has to do with the rows of the batch, read from the graph that computes it.

A step sees this rank's rows where one process would see all of them. How the ranks' values of a loss combine to that
of the whole batch depends on how the program made it, and the program's graph tells:

- a *total* over rows, times a power of the number of rows: with power 0 a sum (the ranks' values add up), with -1 a
  mean (they are weighed by the ranks' shares of the rows);
- *independent* of the rows: equal on all ranks (a regularizer);
- a *function* of such totals (a ratio, a root): combined by `row_values`, from the totals of all ranks;
- *rows*: one value, or several, for each row;
- *opaque*: rows went into an operation whose result says nothing about them. Taken for a mean.

The reading follows the dimension of the rows through the operations between; an operation that is not known here
keeps it where its output's shape allows. It is done once, when a step is traced, and costs microseconds an operation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from keras_ddl.compat import tensorflow as tf_compat
from keras_ddl.compat.tensorflow import tf


@dataclass(frozen=True)
class Kind:
    """What a tensor has to do with the rows."""

    name: (
        str  # independent | rows | total | count | shape | mean (over some of the rows) | max | min | function | opaque
    )
    axis: int = 0  # rows: the dimension along which they lie; shape: the element that counts them
    power: int = 0  # rows, total, count: the power of the number of rows in it
    whole: bool = True  # rows, shape: all of the batch, not some of them
    mixed: bool = False  # a row's value depends on other rows of this rank
    compared: bool = False  # and on them one by one, not on totals alone
    splits: bool = False  # where the rows of a ragged tensor begin: one more than there are rows

    @property
    def is_mean(self) -> bool:
        return self.name == "total" and self.power == -1

    @property
    def is_sum(self) -> bool:
        return (self.name == "total" and self.power == 0) or (self.name == "count" and self.power == 1)


INDEPENDENT = Kind("independent")
ROWS = Kind("rows")
FUNCTION = Kind("function")
OPAQUE = Kind("opaque")
SUM = Kind("total")
MEAN = Kind("total", power=-1)
COUNT = Kind("count", power=1)
IN_LIST = -1  # the axis of rows that are in a list of tensors, over the steps of a loop
_AGGREGATES = ("total", "count", "mean", "max", "min", "function", "opaque")

# Keep what they are given, whatever that is.
_SAME = frozenset(
    (
        "Identity", "IdentityN", "Cast", "Neg", "StopGradient", "PreventGradient", "Snapshot", "CheckNumerics",
        "PlaceholderWithDefault", "EnsureShape", "OptimizationBarrier", "DebugGradientIdentity",
    )
)  # fmt: skip
_SUMS_OF_INPUTS = frozenset(
    (
        "Add", "AddV2", "Sub", "AddN", "BiasAdd", "Pack", "ConcatV2", "SelectV2", "Select",
    )
)  # fmt: skip
# Linear in their first input where the others are independent of the rows.
_LINEAR_IN_FIRST = frozenset(
    (
        "Reshape", "Squeeze", "ExpandDims", "BroadcastTo", "Tile", "StridedSlice", "Slice", "GatherV2",
        "Unpack", "Transpose", "Pad", "PadV2", "Reverse", "ReverseV2", "Cumsum",
    )
)  # fmt: skip
_QUOTIENTS = frozenset(
    (
        "RealDiv", "Div", "DivNoNan", "Xdivy",
    )
)  # fmt: skip
_PRODUCTS = frozenset(
    (
        "Mul", "MulNoNan", "MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum", "Conv2D",
    )
)  # fmt: skip
_REDUCTIONS = frozenset(
    (
        "Sum", "Mean", "Max", "Min", "Prod", "All", "Any", "EuclideanNorm",
    )
)  # fmt: skip
# Their results lie along dimension 0 as the rows do, but are not one for each row.
_SOME_ROWS = frozenset(
    (
        "Where", "GatherNd", "DynamicPartition", "DynamicStitch", "Unique", "UniqueV2", "UniqueWithCounts",
        "UniqueWithCountsV2", "Bincount", "RaggedGather", "RaggedRange", "NonMaxSuppressionV3",
        "RandomShuffle",
    )
)  # fmt: skip
_ALONG_LAST = frozenset(
    (
        "Softmax", "LogSoftmax", "TopKV2",
    )
)  # fmt: skip
_COLLECTIVES = frozenset(
    (
        "DdlAllReduce", "DdlAllReduceN", "DdlBroadcast", "DdlAllGather",
    )
)  # fmt: skip
_CALLS = frozenset(
    (
        "PartitionedCall", "StatefulPartitionedCall",
    )
)  # fmt: skip
_FLOW = frozenset(("While", "StatelessWhile", "If", "StatelessIf", "Case", "StatelessCase"))
# Their own gradients and values concern this rank's rows by definition: keras.layers normalise, mask, and count.
_LAYERS = ("keras/src/layers/", "tensorflow/python/ops/parallel_for/")
_CALLS_LAYERS = "layers/layer.py"
_LIBRARIES = ("/keras/src/", "/tensorflow/python/", "/keras_ddl/strategy/", "/keras_ddl/ops/")


class RowKinds:
    """Reads the tensors of one step.

    Args:
        rows: static number of this rank's rows, or None.
        sources: tensors whose kind is known: the batch, and what keras_ddl has computed itself.
    """

    def __init__(self, rows: int | None) -> None:
        self.static_rows = rows
        self._known: dict[tuple[int, str, int], Kind] = {}
        self._keep: list[Any] = []

    def mark(self, tensor: Any, kind: Kind) -> None:
        """Makes the kind of a tensor known."""
        self._known[_key(tensor)] = kind
        self._keep.append(tensor)

    def mark_batch(self, batch: Any) -> None:
        """Marks the tensors of a batch as its rows; the parts of ragged and sparse ones as lying along the rows."""
        for leaf in tf.nest.flatten(batch):
            if isinstance(leaf, tf.SparseTensor):
                self.mark(leaf.dense_shape, Kind("shape", power=1))
                parts = [leaf.indices, leaf.values]
            elif isinstance(leaf, tf.RaggedTensor):
                self.mark(leaf.row_splits, replace(ROWS, whole=False, splits=True))
                parts = [leaf.flat_values, *leaf.nested_row_splits[1:]]
            elif tf.is_tensor(leaf) and leaf.shape.rank != 0:
                self.mark(leaf, ROWS)
                continue
            else:
                continue
            for part in parts:
                self.mark(part, replace(ROWS, whole=False))

    def of(self, tensor: Any) -> Kind:
        """Returns the kind of a symbolic tensor (an eager one is a constant: independent)."""
        if not hasattr(tensor, "op") or tf_compat.is_eager(tensor):
            return INDEPENDENT
        pending = [tensor]
        while pending:
            current = pending[-1]
            if _key(current) in self._known:
                pending.pop()
                continue
            missing = [each for each in self._inputs(current) if _key(each) not in self._known]
            if missing:
                pending.extend(missing)
                continue
            pending.pop()
            self._known[_key(current)] = self._read(current)
        return self._known[_key(tensor)]

    def _inputs(self, tensor: Any) -> list[Any]:
        operation = tensor.op
        if operation.type in _COLLECTIVES:
            return []
        if operation.type == "Placeholder":
            outside = tf_compat.captured_from(tensor)
            return [] if outside is None or not hasattr(outside, "op") or tf_compat.is_eager(outside) else [outside]
        return [each for each in operation.inputs if each.dtype != tf.resource]

    def _read(self, tensor: Any) -> Kind:
        operation = tensor.op
        if operation.type in _COLLECTIVES:
            return INDEPENDENT
        if operation.type == "Placeholder":
            return self._placeholder(tensor)
        inputs = self._inputs(tensor)
        kinds = [self._known[_key(each)] for each in inputs]
        if all(kind == INDEPENDENT for kind in kinds):
            return INDEPENDENT
        kind = _rule(operation.type)(self, operation, tensor, inputs, kinds)
        if kind.name in ("mean", "max", "min") and not (_is_reduction(operation) and kinds[0].name == "rows"):
            kind = replace(kind, name="function")  # of it: these are no longer what they were if negated, or added up
        if any(each.mixed for each in kinds) and kind.name in ("rows", *_AGGREGATES):
            kind = replace(kind, mixed=True, compared=kind.compared or any(each.compared for each in kinds))
        return kind

    def _placeholder(self, tensor: Any) -> Kind:
        outside = tf_compat.captured_from(tensor)
        if outside is not None:
            return self._known.get(_key(outside), INDEPENDENT) if hasattr(outside, "op") else INDEPENDENT
        if tensor.dtype == tf.resource:
            return INDEPENDENT
        if tensor.dtype == tf.variant:
            return replace(ROWS, axis=IN_LIST)
        # An argument of a function inside the step: rows, if it can be.
        return ROWS if self.could_be_rows(tensor) else OPAQUE

    def is_bare_mean(self, tensor: Any) -> bool:
        """Whether a tensor is a mean over rows that nothing has multiplied or divided since."""
        while True:
            kind, operation = self.of(tensor), tensor.op
            if not kind.is_mean:
                return False
            if operation.type == "Mean" and self.of(operation.inputs[0]).name == "rows":
                return True
            if operation.type in _QUOTIENTS and self.of(operation.inputs[1]).name == "count":
                return True
            if operation.type not in (*_SAME, "Add", "AddV2", "AddN", "Pack", "Sum", "Reshape", "Squeeze"):
                return False
            tensor = next((each for each in operation.inputs if self.of(each).is_mean), None)
            if tensor is None:
                return False

    def could_be_rows(self, tensor: Any, axis: int = 0) -> bool:
        """Whether a dimension of the tensor may be that of the rows, as far as static shapes tell."""
        shape = tensor.shape
        if shape.rank is None:
            return True
        if shape.rank <= axis:
            return False
        if shape[axis] is None:
            return True
        return self.static_rows is not None and shape[axis] > 0 and shape[axis] % self.static_rows == 0

    # ---- rules: (operation, output, inputs, kinds of inputs) -> kind

    def _default(self, operation: Any, output: Any, inputs: Sequence[Any], kinds: Sequence[Kind]) -> Kind:
        rows = [kind for kind in kinds if kind.name == "rows"]
        if not rows:
            if any(kind.name == "opaque" for kind in kinds):
                return OPAQUE
            if all(kind.name in ("independent", "shape") for kind in kinds):
                return self._of_shape(output)
            if operation.type in ("Range", "LinSpace", "OneHot", "Fill") and self.could_be_rows(output):
                return ROWS  # a number for each row
            return FUNCTION
        axis = self._axis(operation, output, rows)
        if axis is None:
            return OPAQUE
        compared = operation.type == "RandomShuffle"
        mixed = False
        if operation.type not in _FLOW and output.dtype != tf.variant:
            apart = any(kind.axis != rows[0].axis for kind in rows if kind.axis != IN_LIST)
            compared = compared or (apart and not _in_layer(operation))
            # A layer of Keras may look at its rows (normalisation, masks): what it makes of them is its own affair.
            mixed = any(kind.name in _AGGREGATES for kind in kinds) and not _in_layer(operation)
        mixed = mixed or compared
        whole = all(kind.whole for kind in rows) and operation.type not in _SOME_ROWS
        return Kind("rows", axis=axis, power=rows[0].power, whole=whole, mixed=mixed, compared=compared)

    def _axis(self, operation: Any, output: Any, rows: Sequence[Kind]) -> int | None:
        """Returns where rows that went into an operation lie in its output; None if there is no room for them."""
        if output.dtype == tf.variant:
            return IN_LIST
        if output.shape.rank is None:
            return max(rows[0].axis, 0)
        # Lists are over time: what comes out of one has the rows behind it.
        room = [axis for axis in range(output.shape.rank) if self.could_be_rows(output, axis)]
        if operation.type == "TensorListStack" and 1 in room:
            return 1
        wanted = [kind.axis for kind in rows if kind.axis in room]
        return wanted[0] if wanted else next(iter(room), None)

    def _of_shape(self, output: Any) -> Kind:
        """What has a shape that contains the number of rows: ones, zeros, a range, random numbers."""
        return ROWS if output.shape.rank != 0 and self.could_be_rows(output) else COUNT

    def _same(self, operation: Any, output: Any, inputs: Sequence[Any], kinds: Sequence[Kind]) -> Kind:
        return kinds[output.value_index] if operation.type == "IdentityN" else kinds[0]

    def _reduction(self, operation: Any, output: Any, inputs: Sequence[Any], kinds: Sequence[Kind]) -> Kind:
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
            return self._default(operation, output, inputs, kinds)
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

    def _sum_of_inputs(self, operation: Any, output: Any, inputs: Sequence[Any], kinds: Sequence[Kind]) -> Kind:
        if operation.type == "Sub" and kinds[0].splits and tf_compat.constant_value(inputs[1]) == 1:
            return COUNT
        counts = [i for i, kind in enumerate(kinds) if kind.name == "count"]
        others = [kind for kind in kinds if kind.name not in ("count", "independent")]
        if operation.type == "Pack" and output.dtype.is_integer and counts and not others:
            return Kind("shape", axis=counts[0])
        if any(kind.name == "shape" for kind in kinds):
            return next(kind for kind in kinds if kind.name == "shape")
        if any(kind.name == "rows" for kind in kinds):
            kind = self._default(operation, output, inputs, kinds)
            axis = next(each.axis for each in kinds if each.name == "rows")
            if operation.type == "Pack" and operation.get_attr("axis") <= axis:
                return replace(kind, name="rows", axis=axis + 1)
            return kind
        if operation.type in ("Select", "SelectV2"):
            if kinds[0] != INDEPENDENT:
                return FUNCTION
            inputs, kinds = inputs[1:], kinds[1:]
        kinds = [kind for each, kind in zip(inputs, kinds) if kind != INDEPENDENT or not _is_zero(each)]
        if all(kind == kinds[0] for kind in kinds):
            return kinds[0]
        if all(kind == INDEPENDENT or kind.is_mean for kind in kinds):
            return next(kind for kind in kinds if kind.is_mean)  # both are weighed by the share of the rows
        return OPAQUE if any(kind.name == "opaque" for kind in kinds) else FUNCTION

    def _product(self, operation: Any, output: Any, inputs: Sequence[Any], kinds: Sequence[Kind]) -> Kind:
        rows = [kind for kind in kinds if kind.name == "rows"]
        counts = [kind for kind in kinds if kind.name == "count"]
        if operation.type in ("Mul", "MulNoNan") and len(kinds) == 2:
            return self._scaled(operation, output, inputs, kinds, 1)
        if len(rows) == 2:
            return self._contraction(operation, output, inputs, kinds)
        if not rows and not counts and INDEPENDENT in kinds:
            return next(kind for kind in kinds if kind != INDEPENDENT)
        return self._default(operation, output, inputs, kinds)

    def _quotient(self, operation: Any, output: Any, inputs: Sequence[Any], kinds: Sequence[Kind]) -> Kind:
        return self._scaled(operation, output, inputs, kinds, -1)

    def _scaled(self, operation: Any, output: Any, inputs: Sequence[Any], kinds: Sequence[Kind], sign: int) -> Kind:
        """A product (sign 1) or quotient (-1) of two: powers of the number of rows multiply."""
        first, second = kinds
        if sign == 1 and (first.name == "count" or first == INDEPENDENT):
            first, second = second, first
            inputs = inputs[::-1]
        if second == INDEPENDENT:
            if first.name == "total" and sign == -1 and self._divides_by_rows(inputs):
                return replace(first, power=first.power - 1)
            return first if first.name != "shape" else self._of_shape(output)
        if second.name == "count" and first.name in ("rows", "total", "count"):
            return replace(first, power=first.power + sign * second.power)
        if second.name == "count" and first == INDEPENDENT:
            return replace(second, power=sign * second.power)
        return self._default(operation, output, inputs, kinds)

    def _divides_by_rows(self, inputs: Sequence[Any]) -> bool:
        """Whether a total is divided by a constant that is the static number of the rows, or of all it sums up."""
        total, divisor = inputs
        value = tf_compat.constant_value(divisor)
        if self.static_rows is None or value is None or value.ndim:
            return False
        while total.op.type in _SAME:
            total = total.op.inputs[0]
        elements = None
        if total.op.type == "Sum":
            elements = total.op.inputs[0].shape.num_elements()
        from_shape = divisor.op.type == "Cast" or tf_compat.constant_value(divisor) is None
        return value == self.static_rows or (value == elements and from_shape)

    def _contraction(self, operation: Any, output: Any, inputs: Sequence[Any], kinds: Sequence[Kind]) -> Kind:
        """A product of two tensors of rows that sums over a dimension: over the rows themselves, or inside each."""
        labels = _labels(operation, inputs)
        if labels is None:
            return self._default(operation, output, inputs, kinds)
        of_rows = {label[kind.axis] for label, kind in zip(labels[0], kinds)}
        kept = [labels[1].index(each) for each in of_rows if each in labels[1]]
        whole, mixed = all(kind.whole for kind in kinds), any(kind.mixed for kind in kinds)
        if not kept:
            return Kind("total", power=sum(kind.power for kind in kinds), mixed=mixed)
        kind = Kind("rows", axis=min(kept), power=kinds[0].power, whole=whole, mixed=mixed)
        return _comparing(kind, len(of_rows) > 1 and not _in_layer(operation))  # every row with every other

    def _first(self, operation: Any, output: Any, inputs: Sequence[Any], kinds: Sequence[Kind]) -> Kind:
        first = kinds[0]
        if first.name == "shape" and operation.type in ("StridedSlice", "GatherV2"):
            return self._element(operation, output, inputs, first)
        if first.name in _AGGREGATES and all(kind == INDEPENDENT for kind in kinds[1:]):
            return first
        if first.name != "rows":
            return self._default(operation, output, inputs, kinds)
        axis = _moved_axis(operation, inputs, output, first.axis)
        if axis is None or not self.could_be_rows(output, axis):
            return self._default(operation, output, inputs, kinds)
        if operation.type in ("Cumsum", "Reverse", "ReverseV2"):
            return _comparing(first, _along(inputs, first.axis))
        if operation.type not in ("Slice", "StridedSlice", "GatherV2") or not _takes_some(
            operation, inputs, first.axis
        ):
            return replace(first, axis=axis)
        by_position = self._takes_by_position(operation, inputs, kinds, first.axis)
        return _comparing(replace(first, axis=axis, whole=False), by_position)

    def _takes_by_position(self, operation: Any, inputs: Sequence[Any], kinds: Sequence[Kind], axis: int) -> bool:
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
        return not all(self._counts_rows(each, kind, axis, ends) for each, kind in zip(inputs[1:3], kinds[1:3]))

    def _counts_rows(self, bounds: Any, kind: Kind, axis: int, ends: Sequence[int]) -> bool:
        """Whether a bound of a slice is nothing, the end, or a multiple of the number of rows."""
        if kind.name == "shape":
            return kind.axis == axis and kind.whole
        bound = tf_compat.constant_value(bounds)
        if kind != INDEPENDENT or bound is None:
            return False
        return bound[axis] in ends or (self.static_rows is not None and bound[axis] % self.static_rows == 0)

    def _along_an_axis(self, operation: Any, output: Any, inputs: Sequence[Any], kinds: Sequence[Kind]) -> Kind:
        """What compares the elements along a dimension: a softmax, a sort, a cumulative product, a shift."""
        kind = self._default(operation, output, inputs, kinds)
        first = kinds[0]
        if kind.name != "rows" or first.name != "rows":
            return kind
        rank = inputs[0].shape.rank
        if operation.type in _ALONG_LAST:
            along = rank is None or first.axis == rank - 1
        else:
            along = _along(inputs[:1] + inputs[-1:], first.axis)
        return _comparing(kind, along)

    def _split(self, operation: Any, output: Any, inputs: Sequence[Any], kinds: Sequence[Kind]) -> Kind:
        """Pieces of a tensor. Along the rows: the batches that were put one after another, or some rows by position."""
        split_v = operation.type == "SplitV"
        value, at = (0, 2) if split_v else (1, 0)
        kind = kinds[value]
        if kind.name in _AGGREGATES:
            return kind
        axis = tf.get_static_value(inputs[at])
        if kind.name != "rows" or axis is None or inputs[value].shape.rank is None:
            return self._default(operation, output, inputs, kinds)
        if int(axis) % inputs[value].shape.rank != kind.axis:
            return kind
        return (
            kind
            if not split_v and operation.get_attr("num_split") == self._batches_in(inputs[value])
            else (_comparing(replace(kind, whole=False), True))
        )

    def _batches_in(self, tensor: Any) -> int:
        """How many batches of rows have been put one after another to make a tensor."""
        while self.of(tensor).name == "rows":
            parts = [each for each in tensor.op.inputs if self.of(each).name == "rows"]
            if tensor.op.type == "ConcatV2" and tf.get_static_value(tensor.op.inputs[-1]) == self.of(tensor).axis:
                return sum(self._batches_in(each) for each in parts)
            if not parts:
                return 1
            tensor = parts[0]
        return 1

    def _best(self, operation: Any, output: Any, inputs: Sequence[Any], kinds: Sequence[Kind]) -> Kind:
        """The position of the largest."""
        if kinds[0].name != "rows":
            return self._default(operation, output, inputs, kinds)
        if _along(inputs, kinds[0].axis):
            return OPAQUE
        at = int(tf.get_static_value(inputs[1])) % inputs[0].shape.rank
        return replace(kinds[0], axis=kinds[0].axis - (at < kinds[0].axis), power=0)

    def _squares(self, operation: Any, output: Any, inputs: Sequence[Any], kinds: Sequence[Kind]) -> Kind:
        if kinds[0].name != "rows" or kinds[0].power:
            return self._default(operation, output, inputs, kinds)
        return replace(SUM, mixed=kinds[0].mixed)

    def _segments(self, operation: Any, output: Any, inputs: Sequence[Any], kinds: Sequence[Kind]) -> Kind:
        """Rows put into a fixed number of groups, which all ranks have alike."""
        values, groups, number = kinds[0], kinds[1], kinds[-1]
        along = all(kind.name == "rows" and kind.axis == 0 for kind in (values, groups) if kind != INDEPENDENT)
        if number != INDEPENDENT or not along:
            return self._default(operation, output, inputs, kinds)
        mixed = any(kind.mixed for kind in kinds)
        if operation.type == "UnsortedSegmentSum":
            return Kind("total", power=values.power, mixed=mixed)
        return Kind("max" if operation.type == "UnsortedSegmentMax" else "min", mixed=mixed)

    def _element(self, operation: Any, output: Any, inputs: Sequence[Any], shape: Kind) -> Kind:
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

    def _shape(self, operation: Any, output: Any, inputs: Sequence[Any], kinds: Sequence[Kind]) -> Kind:
        kind = kinds[0]
        if kind.name != "rows":
            return INDEPENDENT
        if operation.type == "Size":
            return COUNT if kind.whole else SUM
        return Kind("shape", axis=kind.axis, whole=kind.whole, splits=kind.splits)

    def _maximum(self, operation: Any, output: Any, inputs: Sequence[Any], kinds: Sequence[Kind]) -> Kind:
        if sorted(kind.name for kind in kinds) == ["count", "independent"]:
            return next(kind for kind in kinds if kind.name == "count")  # at least one row, to divide by
        return self._default(operation, output, inputs, kinds)

    def _call(self, operation: Any, output: Any, inputs: Sequence[Any], kinds: Sequence[Kind]) -> Kind:
        graph = tf_compat.called_graph(operation)
        if graph is None or len(graph.inputs) != len(operation.inputs):
            return self._default(operation, output, inputs, kinds)
        inside = RowKinds(self.static_rows)
        inside._known.update(self._known)  # what was marked while the function was traced
        known = {_key(each): kind for each, kind in zip(inputs, kinds)}
        for placeholder, given in zip(graph.inputs, operation.inputs):
            inside.mark(placeholder, known.get(_key(given), INDEPENDENT))
        return inside.of(graph.outputs[output.value_index])


_Rule = Callable[[RowKinds, Any, Any, Sequence[Any], Sequence[Kind]], Kind]


def _rule(operation_type: str) -> _Rule:
    for types, rule in _RULES:
        if operation_type in types:
            return rule
    return RowKinds._default


_RULES: list[tuple[frozenset[str], _Rule]] = [
    (_SAME, RowKinds._same),
    (_REDUCTIONS, RowKinds._reduction),
    (_SUMS_OF_INPUTS, RowKinds._sum_of_inputs),
    (_PRODUCTS, RowKinds._product),
    (_QUOTIENTS, RowKinds._quotient),
    (_LINEAR_IN_FIRST, RowKinds._first),
    (frozenset(("Split", "SplitV")), RowKinds._split),
    (frozenset(("Shape", "ShapeN", "Size")), RowKinds._shape),
    (frozenset(("Maximum",)), RowKinds._maximum),
    (_ALONG_LAST | {"Cumprod", "CumulativeLogsumexp", "Roll"}, RowKinds._along_an_axis),
    (frozenset(("ArgMax", "ArgMin")), RowKinds._best),
    (frozenset(("L2Loss",)), RowKinds._squares),
    (frozenset(("UnsortedSegmentSum", "UnsortedSegmentMax", "UnsortedSegmentMin")), RowKinds._segments),
    (_CALLS, RowKinds._call),
]


def _key(tensor: Any) -> tuple[int, str, int]:
    return id(tensor.graph), tensor.op.name, tensor.value_index


def _is_reduction(operation: Any) -> bool:
    return operation.type in _REDUCTIONS or operation.type.startswith("UnsortedSegment")


def _comparing(kind: Kind, compares: bool) -> Kind:
    return replace(kind, mixed=True, compared=True) if compares else kind


def _in_layer(operation: Any) -> bool:
    """Whether a layer of Keras has made the operation, rather than a layer of the program's, which Keras calls."""
    for frame in reversed(list(operation.traceback or ())):
        path = frame.filename.replace("\\", "/")
        if any(each in path for each in _LAYERS) and not path.endswith(_CALLS_LAYERS):
            return True
        if not any(each in path for each in _LIBRARIES):
            return False
    return False


def _is_zero(tensor: Any) -> bool:
    value = tf_compat.constant_value(tensor)
    return value is not None and not value.any()


def _labels(operation: Any, inputs: Sequence[Any]) -> tuple[list[str], str] | None:
    """Returns letters for the dimensions of the factors of a product and of its result, as in an einsum."""
    if operation.type == "Einsum":
        factors, _, result = operation.get_attr("equation").decode().partition("->")
        return None if "." in factors else (factors.split(","), result)
    if "MatMul" not in operation.type or any(each.shape.rank is None for each in inputs):
        return None
    transposed = [
        operation.get_attr(name)
        for name in (("transpose_a", "transpose_b") if operation.type == "MatMul" else ("adj_x", "adj_y"))
    ]
    batch = "abcdefgh"[: max(each.shape.rank for each in inputs) - 2]
    first = batch + ("kx" if transposed[0] else "xk")
    second = batch + ("yk" if transposed[1] else "ky")
    return [label[-each.shape.rank :] for label, each in zip((first, second), inputs)], batch + "xy"


def _moved_axis(operation: Any, inputs: Sequence[Any], output: Any, axis: int) -> int | None:
    """Returns where a dimension is after an operation that only arranges; None if that cannot be told."""
    kind = operation.type
    if kind == "Transpose":
        order = tf.get_static_value(inputs[1])
        return None if order is None else [int(each) for each in order].index(axis)
    if kind == "ExpandDims":
        at, rank = tf.get_static_value(inputs[1]), inputs[0].shape.rank
        if at is None or rank is None:
            return None
        return axis + (int(at) % (rank + 1) <= axis)
    if kind == "Squeeze":
        rank = inputs[0].shape.rank
        gone = [each % rank for each in operation.get_attr("squeeze_dims")] if rank else []
        return axis - sum(each < axis for each in gone)
    if kind == "Unpack":
        return None if operation.get_attr("axis") == axis else axis - (operation.get_attr("axis") < axis)
    if kind == "StridedSlice":
        new, shrunk = operation.get_attr("new_axis_mask"), operation.get_attr("shrink_axis_mask")
        if operation.get_attr("ellipsis_mask"):
            return axis if axis == 0 and not (new | shrunk) & 1 else None
        position = source = 0
        while source < axis:
            if not new >> position & 1:
                source += 1
            position += 1
        while new >> position & 1:
            position += 1
        if shrunk >> position & 1:
            return None
        return position - sum(shrunk >> each & 1 for each in range(position))
    if kind == "Reshape":
        return 0 if axis == 0 else None
    return axis


def _along(inputs: Sequence[Any], axis: int) -> bool:
    """Whether an operation on inputs[0] goes along `axis`, which its inputs[1] says."""
    axes, rank = tf.get_static_value(inputs[1]), inputs[0].shape.rank
    return axes is None or rank is None or any(int(each) % rank == axis for each in axes.ravel())


def _takes_some(operation: Any, inputs: Sequence[Any], axis: int) -> bool:
    """Whether a slice or a gather takes some of the rows rather than all."""
    if operation.type == "GatherV2":
        at = tf.get_static_value(inputs[2])
        return at is None or int(at) == axis
    if operation.type == "Slice":
        begin, extent = tf.get_static_value(inputs[1]), tf.get_static_value(inputs[2])
        return (
            begin is None
            or begin[axis] != 0
            or (extent is not None and extent[axis] not in (-1, inputs[0].shape[axis]))
        )
    if operation.get_attr("ellipsis_mask"):
        return False
    masks = operation.get_attr("begin_mask") & operation.get_attr("end_mask") | operation.get_attr("new_axis_mask")
    strides = tf.get_static_value(inputs[3])
    if axis >= inputs[1].shape.num_elements():
        return False
    return not masks >> axis & 1 or strides is None or strides[axis] != 1
