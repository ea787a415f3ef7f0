"""The value that one process would have computed, and its gradient, from what each rank computes of its rows.

See row_kinds/ for how a value is read. Means and sums over rows need no communication: their gradients, and what
trackers are told, are weighed and added up with everything else. A function of several totals (a ratio over the batch
such as Dice's, the root of a mean) is computed again from the totals of all ranks, a few bytes: its gradient is
then

    dL/dw = sum over ranks r of  sum over totals t of  (dL/dt at the totals of all ranks) x (dt_r/dw)

which backpropagation on each rank gives when it starts at the rank's own totals with the factors in brackets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from keras_ddl import ops
from keras_ddl.communicator import stack_position
from keras_ddl.communicator.stack_position import user_line
from keras_ddl.compat import tensorflow as tf_compat
from keras_ddl.compat.tensorflow import tf
from keras_ddl.strategy.row_kinds import INDEPENDENT, MEAN, ROWS, Kind, RowKinds
from keras_ddl.strategy.row_share import RowShare

_MOST_OPERATIONS = 2000  # of a function of totals: more is no loss that somebody wrote


@dataclass
class _Combined:
    """A function of totals, at the totals of all ranks."""

    value: tf.Tensor
    parts: list[tf.Tensor]  # this rank's totals, and what is independent of the rows
    seeds: list[tf.Tensor]  # what backpropagation to this rank's parts starts with


class RowValues:
    """Combines the values of one step. All ranks ask for the same ones in the same order: some are COLLECTIVE."""

    def __init__(self, kinds: RowKinds | None, share: RowShare, owner: Any) -> None:
        """`kinds`: None in eager mode, where no graph can be read and every value counts as a mean over rows.
        `owner`: remembers what it has been warned about; the model.
        """
        self.kinds = kinds
        self.share = share
        self.owner = owner
        self._combined: dict[int, tuple[Any, _Combined | None]] = {}

    def kind(self, value: Any) -> Kind:
        """Returns the kind of a tensor; without a graph to read, that of a mean."""
        if self.kinds is not None:
            return self.kinds.of(value)
        return MEAN if value.shape.rank == 0 else ROWS

    def part(self, value: tf.Tensor) -> tf.Tensor:
        """Returns this rank's part of a value: the parts of all ranks add up to that of one process."""
        if self.kinds is None:
            return self._weighed(value)
        kind = self.kind(value)
        if kind.is_sum and not kind.mixed:
            return value
        return self._weighed(self._or_global(value, kind))

    def estimate(self, value: tf.Tensor) -> tf.Tensor:
        """Returns what this rank would take the value of one process for; the means, weighed by the ranks' shares of
        the rows, are that value.
        """
        if self.kinds is None:
            return value
        kind = self.kind(value)
        if kind.is_sum and not kind.mixed:
            return value * tf.cast(self.share.inverse(), value.dtype)
        return self._or_global(value, kind)

    def everyone(self, value: tf.Tensor) -> tf.Tensor:
        """Returns the value that one process would have computed, on every rank. COLLECTIVE."""
        return value if self.kind(value) == INDEPENDENT else ops.all_reduce(self.part(value))

    def of_rows(self, seed: tf.Tensor) -> tf.Tensor:
        """Returns what a program begins backpropagation at rows with; divided by all rows if it divides by its own."""
        kind = self.kinds.of(seed) if self.kinds is not None else ROWS
        if kind.name == "rows" and kind.power == -1 and not kind.mixed:
            return seed * tf.cast(self.share.share(), seed.dtype)
        if kind.name == "rows" and (kind.power or kind.mixed):
            self._warn(seed, kind)
        return seed

    def seeds(self, target: tf.Tensor) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Returns (targets, gradients to begin with): backpropagated on each rank, their sum over ranks is the gradient
        of the target that one process would have computed.
        """
        kind = self.kind(target)
        if kind.name == "rows":  # backpropagation adds up what is no scalar
            kind = Kind("total", power=kind.power, mixed=kind.mixed)
        if kind.is_sum and not kind.mixed:
            return [target], [tf.ones_like(target)]
        if not (kind == INDEPENDENT or kind.is_mean) or kind.mixed:
            combined = self._combine(target, kind)
            if combined is not None:
                return combined.parts, combined.seeds
        return [target], [tf.cast(tf.fill(tf.shape(target), self.share.share()), target.dtype)]

    def _weighed(self, value: tf.Tensor) -> tf.Tensor:
        return tf.math.multiply_no_nan(value, tf.cast(self.share.share(), value.dtype))

    def _or_global(self, value: tf.Tensor, kind: Kind) -> tf.Tensor:
        if kind == INDEPENDENT or (kind.is_mean and not kind.mixed):
            return value
        combined = self._combine(value, kind)
        return value if combined is None else combined.value

    def _combine(self, value: tf.Tensor, kind: Kind) -> _Combined | None:
        if id(value) not in self._combined:
            combined = None
            if value.dtype.is_floating and not kind.compared:
                combined = self._from_rows(value) if kind.mixed else self._from_totals(value)
            if combined is None:
                self._warn(value, kind)
            self._combined[id(value)] = value, combined
        return self._combined[id(value)][1]

    def _from_totals(self, value: tf.Tensor) -> _Combined | None:
        found = self._tail(value) if value.graph is tf.compat.v1.get_default_graph() else None
        if found is None:
            return None
        operations, totals, independent = found
        with tf.name_scope("keras_ddl_totals"), tf_compat.not_recorded():
            pairs = [self._global_total(total) for total in totals]
            replaced = {_key(total): everyone for total, (everyone, _) in zip(totals, pairs)}
            copies = {_key(each): tf.identity(each) for each in independent if each.dtype.is_floating}
            result = tf_compat.compute_again(operations, value, {**replaced, **copies})
            sources = [total for total in totals if total.dtype.is_floating]
            slopes = tf.gradients(result, [replaced[_key(each)] for each in sources] + list(copies.values()))
            parts, seeds = [], []
            factors = [factor for total, (_, factor) in zip(totals, pairs) if total.dtype.is_floating]
            share = self.share.share()
            for part, slope, factor in zip(
                [*sources, *(each for each in independent if each.dtype.is_floating)],
                slopes,
                [*factors, *(share for _ in copies)],
            ):
                if slope is not None:
                    parts.append(part)
                    seeds.append(tf.convert_to_tensor(slope) * tf.cast(factor, part.dtype))
        return _Combined(result, parts, seeds)

    def _from_rows(self, value: tf.Tensor) -> _Combined | None:
        """As `_from_totals`, for values whose rows depend on totals (a variance): computed again from these rows. All
        reductions on the way are taken over all ranks, and so is what backpropagation finds there.
        """
        found = self._tail(value, through_rows=True) if value.graph is tf.compat.v1.get_default_graph() else None
        if found is None:
            return None
        operations, totals, given = found
        given = [each for each in given if each.dtype.is_floating]
        with tf.name_scope("keras_ddl_rows"), tf_compat.not_recorded():
            pairs = [self._global_total(total) for total in totals]
            copies = [tf.identity(each) for each in given]
            replaced = {_key(total): everyone for total, (everyone, _) in zip(totals, pairs)}
            replaced.update((_key(each), copy) for each, copy in zip(given, copies))
            result = tf_compat.compute_again(operations, value, replaced, self._over_all_ranks)
            floating = [(t, everyone, f) for t, (everyone, f) in zip(totals, pairs) if t.dtype.is_floating]
            begin = tf.cast(tf.fill(tf.shape(result), self.share.share()), result.dtype)
            slopes = tf.gradients(result, [everyone for _, everyone, _ in floating] + copies, [begin])
            parts, seeds = [], []
            for (total, _, factor), slope in zip(floating, slopes):
                if slope is not None:
                    parts.append(total)
                    seeds.append(ops.all_reduce(tf.convert_to_tensor(slope)) * tf.cast(factor, total.dtype))
            for each, slope in zip(given, slopes[len(floating) :]):
                if slope is not None:
                    parts.append(each)
                    seeds.append(tf.convert_to_tensor(slope))
        return _Combined(result, parts, seeds)

    def _over_all_ranks(self, before: tf.Tensor, again: tf.Tensor, inputs: Sequence[tf.Tensor]) -> tf.Tensor:
        """What a reduction of rows gives over all ranks, from what it gives here."""
        if not self._reduces_rows(before):
            return again
        if before.op.type != "Mean":
            return ops.all_reduce(again)
        share = self._share_of_elements(again, inputs[0])
        return ops.all_reduce(tf.math.multiply_no_nan(again, tf.cast(share, again.dtype)))

    def _reduces_rows(self, tensor: tf.Tensor) -> bool:
        of = [self.kinds.of(each).name for each in tensor.op.inputs if each.dtype not in (tf.resource, tf.variant)]
        return "rows" in of and self.kinds.of(tensor).name not in ("rows", "shape", "count")

    def _share_of_elements(self, mean: tf.Tensor, of: tf.Tensor) -> tf.Tensor:
        elements = tf.size(of, tf.int64) // tf.maximum(tf.size(mean, tf.int64), 1)
        return tf.math.divide_no_nan(tf.cast(elements, tf.float64), tf.cast(ops.all_reduce(elements), tf.float64))

    def _tail(
        self, value: tf.Tensor, through_rows: bool = False
    ) -> tuple[list[Any], list[tf.Tensor], list[tf.Tensor]] | None:
        """Returns (operations, totals, what else is given): the value is computed by the operations, in their order,
        from the others. What else is given is independent of the rows, or, `through_rows`, rows themselves. None where
        that cannot be done.
        """
        operations: dict[str, Any] = {}
        totals: dict[Any, tf.Tensor] = {}
        given: dict[Any, tf.Tensor] = {}
        pending = [value]
        seen = set()
        while pending:
            tensor = pending.pop()
            if _key(tensor) in seen:
                continue
            seen.add(_key(tensor))
            kind = self.kinds.of(tensor)
            if kind.compared or (kind.mixed and not through_rows):
                return None
            of_rows = through_rows and kind.name in ("rows", "shape")
            if kind == INDEPENDENT or (of_rows and not kind.mixed and (kind.name == "shape" or not kind.power)):
                given[_key(tensor)] = tensor
            elif kind.mixed or of_rows:
                if not self._can_repeat(tensor, kind):
                    return None
                operations[tensor.op.name] = tensor.op
                pending.extend(_values_among(tensor.op))
            elif kind.is_sum or kind.is_mean or kind.name in ("mean", "max", "min"):
                totals[_key(tensor)] = tensor
            elif kind.name in ("total", "count", "function") and tensor.op.type not in _NOT_AGAIN:
                operations[tensor.op.name] = tensor.op
                pending.extend(tensor.op.inputs)
            else:
                return None
            if len(operations) > _MOST_OPERATIONS:
                return None
        by_position = {operation.name: i for i, operation in enumerate(value.graph.get_operations())}
        order = sorted(operations.values(), key=lambda operation: by_position[operation.name])
        return order, list(totals.values()), list(given.values())

    def _can_repeat(self, tensor: tf.Tensor, kind: Kind) -> bool:
        if kind.name == "opaque" or tensor.op.type in _NOT_AGAIN or not tensor.op.inputs:
            return False
        return not self._reduces_rows(tensor) or tensor.op.type in _ADDS_UP

    def _global_total(self, total: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns (the total over all ranks, its derivative by this rank's)."""
        kind = self.kinds.of(total)
        one = tf.ones([], tf.float64)
        if kind.is_sum or kind.name == "count":
            return ops.all_reduce(total), one
        if kind.is_mean:
            return ops.all_reduce(self._weighed(total)), self.share.share()
        if kind.name == "mean":
            return self._mean_of_some(total)
        everyone = ops.all_reduce(total, op=kind.name)
        holds = tf.cast(tf.equal(total, everyone), tf.float64)
        return everyone, tf.math.divide_no_nan(holds, ops.all_reduce(holds))

    def _mean_of_some(self, mean: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """A mean over some of the rows: each rank weighs as many elements as it has there."""
        share = self._share_of_elements(mean, mean.op.inputs[0])
        return ops.all_reduce(tf.math.multiply_no_nan(mean, tf.cast(share, mean.dtype))), share

    def warn_unread(self, what: str) -> None:
        """Warns, once for each model, that there is no graph to read."""
        if self.kinds is not None or self.owner.__dict__.get("_ddl_warned_of_eager"):
            return
        self.owner.__dict__["_ddl_warned_of_eager"] = True
        stack_position.warn(
            "With run_eagerly=True there is no graph that tells how a value depends on the rows of the batch: losses, "
            "trackers and logs by hand count as means over the rank's rows, and what metrics of the program's own hold "
            f"is added up. Received: {what} on {self.share.size} ranks (rank {self.share.rank}). Leave run_eagerly out "
            "where a loss is a sum, a ratio over the batch, or the like."
        )

    def _warn(self, value: tf.Tensor, kind: Kind) -> None:
        warned = self.owner.__dict__.setdefault("_ddl_warned_of_values", set())
        where = user_line(getattr(value.op, "traceback", None)) or value.op.name
        if where in warned:
            return
        warned.add(where)
        if kind.mixed:
            what = "compares rows of the batch with each other, and a rank has only its own"
            remedy = "Gather what is compared with keras_ddl.all_gather, which has a gradient"
        else:
            what = "depends on the rows of the batch in a way that keras_ddl cannot read from its graph"
            remedy = "Write it with means, sums, and functions of these, over the rows"
        stack_position.warn(
            f"A loss, tracker or log entry {what}, so it is taken for a mean over rows and will not be exactly that of "
            f"one process. Received: {value.op.name!r} ({value.op.type}) made in {where} (rank {self.share.rank}). "
            f"{remedy}. See docs/losses.md."
        )


_ADDS_UP = frozenset(
    ("Sum", "Mean", "MatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum", "L2Loss", "UnsortedSegmentSum")
)
_NOT_AGAIN = frozenset(("PartitionedCall", "StatefulPartitionedCall", "If", "StatelessIf", "While", "StatelessWhile"))


def _values_among(operation: Any) -> list[tf.Tensor]:
    """The inputs of an operation that are values. Whole numbers may be shapes, which stay those of this rank's rows,
    unless they are computed with.
    """
    computes = operation.type == "Cast" or not operation.outputs[0].dtype.is_floating
    return [each for each in operation.inputs if computes or not each.dtype.is_integer]


def _key(tensor: Any) -> Any:
    return tensor.op.name, tensor.value_index


def flat_targets(target: Any) -> Sequence[tf.Tensor]:
    """Returns the tensors of a tape's target."""
    return [tf.convert_to_tensor(each) for each in tf.nest.flatten(target)]
