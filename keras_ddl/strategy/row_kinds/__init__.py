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

from dataclasses import replace
from typing import Any

from keras_ddl.compat import tensorflow as tf_compat
from keras_ddl.compat.tensorflow import tf
from keras_ddl.strategy.row_kinds.kinds import (
    AGGREGATES,
    COUNT,
    FUNCTION,
    IN_LIST,
    INDEPENDENT,
    MEAN,
    OPAQUE,
    ROWS,
    SUM,
    Kind,
)
from keras_ddl.strategy.row_kinds.operations import COLLECTIVES, QUOTIENTS, SAME, is_reduction, is_times, key_of
from keras_ddl.strategy.row_kinds.rules import rule_of

__all__ = ["COUNT", "FUNCTION", "INDEPENDENT", "IN_LIST", "MEAN", "OPAQUE", "ROWS", "SUM", "Kind", "RowKinds"]


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
        self._known[key_of(tensor)] = kind
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
            if key_of(current) in self._known:
                pending.pop()
                continue
            missing = [each for each in self._inputs(current) if key_of(each) not in self._known]
            if missing:
                pending.extend(missing)
                continue
            pending.pop()
            self._known[key_of(current)] = self._read(current)
        return self._known[key_of(tensor)]

    def _inputs(self, tensor: Any) -> list[Any]:
        operation = tensor.op
        if operation.type in COLLECTIVES:
            return []
        if operation.type == "Placeholder":
            outside = tf_compat.captured_from(tensor)
            return [] if outside is None or not hasattr(outside, "op") or tf_compat.is_eager(outside) else [outside]
        return [each for each in operation.inputs if each.dtype != tf.resource]

    def _read(self, tensor: Any) -> Kind:
        operation = tensor.op
        if operation.type in COLLECTIVES:
            return INDEPENDENT
        if operation.type == "Placeholder":
            return self._placeholder(tensor)
        inputs = self._inputs(tensor)
        kinds = [self._known[key_of(each)] for each in inputs]
        if all(kind == INDEPENDENT for kind in kinds):
            return INDEPENDENT
        kind = rule_of(operation.type)(self, operation, tensor, inputs, kinds)
        if kind.name in ("mean", "max", "min") and not (is_reduction(operation) and kinds[0].name == "rows"):
            kind = replace(kind, name="function")  # of it: these are no longer what they were if negated, or added up
        if any(each.mixed for each in kinds) and kind.name in ("rows", *AGGREGATES):
            kind = replace(kind, mixed=True, compared=kind.compared or any(each.compared for each in kinds))
        return kind

    def _placeholder(self, tensor: Any) -> Kind:
        outside = tf_compat.captured_from(tensor)
        if outside is not None:
            return self._known.get(key_of(outside), INDEPENDENT) if hasattr(outside, "op") else INDEPENDENT
        if tensor.dtype == tf.resource:
            return INDEPENDENT
        if tensor.dtype == tf.variant:
            return replace(ROWS, axis=IN_LIST)
        # An argument of a function inside the step: rows, if it can be.
        return ROWS if self.could_be_rows(tensor) else OPAQUE

    def inside_function(self) -> RowKinds:
        """Returns a reader for a function that the step calls, which knows what was marked while that was traced."""
        inside = RowKinds(self.static_rows)
        inside._known.update(self._known)
        return inside

    def is_bare_mean(self, tensor: Any, size: int) -> bool:
        """Whether a tensor is a mean over rows that nothing has multiplied or divided since, nor their number by that
        of the ranks, as tf.nn.compute_average_loss does.
        """
        while True:
            kind, operation = self.of(tensor), tensor.op
            if not kind.is_mean:
                return False
            if operation.type == "Mean" and self.of(operation.inputs[0]).name == "rows":
                return True
            if operation.type in QUOTIENTS and self.of(operation.inputs[1]).name == "count":
                return not is_times(operation.inputs[1], size)
            if operation.type not in (*SAME, "Add", "AddV2", "AddN", "Pack", "Sum", "Reshape", "Squeeze"):
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
