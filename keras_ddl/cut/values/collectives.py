"""The collectives of a step, built with keras_ddl.ops."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Sequence
from hashlib import blake2b
from typing import NamedTuple

from keras_ddl import ops
from keras_ddl.communicator import Communicator
from keras_ddl.compat.tensorflow import set_numbers, tf
from keras_ddl.cut.analysis.program import Node, Value

GATHER = "gather"
_SUM_ATTRIBUTES = ("tensor_name", "T", "reduction", "compression", "feedback")
# Dtypes that ranks can combine (ops.all_reduce), bools as uint8. Values of other dtypes are never parts.
COMBINED_DTYPES = frozenset(
    (tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.int32, tf.int64, tf.uint8, tf.int8, tf.bool)
)
# Name scopes of tf.GradientTape and tf.gradients.
_BACKWARD = ("gradient_tape/", "gradients/")


def is_weight_gradient(value: Value, shapes: Container[tuple[int, ...]]) -> bool:
    """Whether a sum over rows is certainly the gradient of a kernel or a similar weight.

    This means a float32 of two axes or more that a backward pass made, with the shape of a trained variable (`shapes`).
    Small tensors such as biases, and statistics of a batch, stay exact: they hardly add to the bytes, and an error that
    is corrected in the next step must not be in a value that belongs to this one.
    """
    if value.dtype != tf.float32 or (value.rank or 0) < 2 or not value.shape.is_fully_defined():
        return False
    return tuple(value.shape.as_list()) in shapes and _is_from_backward(value.node)


def _is_from_backward(node: Node) -> bool:
    if any(each in node.operation.name for each in _BACKWARD):
        return True
    # If a weight is used several times, the tape adds up its gradients under another name.
    return node.type == "AddN" and all(_is_from_backward(value.node) for value in node.inputs)


class Depths(NamedTuple):
    """The least and the greatest `Node.depth` of the nodes that give the tensors of a collective."""

    least: int
    greatest: int


class Reduction(NamedTuple):
    """The options of a reduction.

    Attributes:
        depths: see `Depths`; None: unknown.
        compressed: whether values are rounded to 16 bits between hosts.
    """

    depths: Depths | None = None
    compressed: bool = False


PLAIN = Reduction()


class Collectives:
    """Puts collectives into the graph; `name` is the same on all ranks and used once in a step."""

    rank: int
    size: int

    def kind_of(self, node: Node) -> str | None:
        """Returns which collective an operation is: the op of a reduction, or GATHER; None: it is no collective."""
        return None

    def reduce(self, tensors: Sequence[tf.Tensor], op: str, name: str, how: Reduction = PLAIN) -> list[tf.Tensor]:
        """Returns the tensors combined over ranks by `op`; shapes are equal on all ranks."""
        raise NotImplementedError

    def compresses(self, value: Value, op: str) -> bool:
        """Whether to round `value` between hosts when it is reduced (`Reduction.compressed`)."""
        return False

    def gather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Returns the ranks' tensors, concatenated along axis 0, where their extents may differ."""
        raise NotImplementedError

    def reduce_scatter(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Returns this rank's rows of the sum over ranks; if they are uneven, the first ranks have one more."""
        raise NotImplementedError

    def shift(self, tensor: tf.Tensor, offset: int, name: str) -> tf.Tensor:
        """Returns the tensor of rank (rank - offset) % size; extents along axis 0 may differ."""
        raise NotImplementedError

    def all_to_all(
        self, tensor: tf.Tensor, splits: tf.Tensor, name: str, depths: Depths | None = None
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Sends each rank `splits[rank]` rows, in order. Returns the rows from all ranks, and their numbers."""
        raise NotImplementedError

    def buckets(self, sizes: Sequence[int], dtypes: Sequence[str]) -> list[list[int]]:
        """Groups tensors, given their bytes, in the order in which they become ready."""
        raise NotImplementedError


class StepCollectives(Collectives):
    """Collectives of the job's ranks (keras_ddl.ops) for the step in the current graph.

    Sums and exchanges that run whenever the step runs form the step's plan: a list in which no collective needs the
    result of a later one, roughly in the order in which they become ready (`_by_depth`). Ranks run them in that order
    without asking rank 0 (native/core/src/engine/plan_lane.h). A collective inside a branch may not run, so ranks match
    it by name instead. On a mesh each axis has its own plan, in the order of the graph: among all collectives that have
    not run yet, the first one in the graph can always run.

    Args:
        scope: begins every name.
        plan: groups tensors into buckets; see `Collectives.buckets`.
        compression: compression of the gradients of weights with shapes `weights`, or None; see `ops.all_reduce_n`.
        comm: communicator of a mesh axis; None: all ranks of the job. `rank` and `size` refer to it.
        feedback: prefix of the keys under which rounding errors are kept. Programs that reduce the same gradients in
            the same order may share a prefix, for example those of full batches and of a smaller last batch.
    """

    def __init__(
        self,
        scope: str,
        rank: int,
        size: int,
        plan: Callable[[Sequence[int], Sequence[str]], list[list[int]]],
        *,
        comm: Communicator | None = None,
        compression: str | None = None,
        weights: Collection[tuple[int, ...]] = (),
        feedback: str = "",
    ) -> None:
        self.rank = rank
        self.size = size
        self._scope = scope
        self._prefix = f"{comm.prefix if comm else ''}{scope}/"
        self._plan = plan
        self._comm = comm
        self._compression = compression
        self._weights = weights
        self._feedback = feedback
        self._compressed = 0
        self._graph = tf.compat.v1.get_default_graph()
        self._begins_with: tf.Operation | None = None
        self._depths: dict[str, Depths] = {}  # by the names of operations
        self._is_in_branches = False  # whether some collectives are in branches

    def reduce(self, tensors: Sequence[tf.Tensor], op: str, name: str, how: Reduction = PLAIN) -> list[tf.Tensor]:
        compression = feedback = None
        if how.compressed:
            compression, feedback = self._compression, f"{self._feedback}/{self._compressed}"
            self._compressed += 1
        reduced = ops.all_reduce_n(
            tensors,
            op=op,
            name=self._key(name),
            compression=compression,
            feedback=feedback,
            comm=self._comm,
        )
        self._note_depths(reduced[0].op, how.depths)
        return reduced

    def _note_depths(self, operation: tf.Operation, depths: Depths | None) -> None:
        # On a mesh the plans of all axes follow one order, that of the graph.
        if depths is not None and self._comm is None and operation.graph is self._graph:
            self._depths[operation.name] = depths

    def _key(self, name: str) -> str:
        self._is_in_branches |= tf.compat.v1.get_default_graph() is not self._graph
        return f"{self._scope}/{name}"

    def kind_of(self, node: Node) -> str | None:
        if node.type == "DdlAllReduceN":
            return node.attr("reduction", bytes).decode()
        return GATHER if node.type == "DdlAllGather" else None

    def compresses(self, value: Value, op: str) -> bool:
        return self._compression is not None and op == "sum" and is_weight_gradient(value, self._weights)

    def gather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        return ops.all_gather(tensor, name=self._key(name), comm=self._comm)

    def reduce_scatter(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        return ops.reduce_scatter(tensor, name=self._key(name), comm=self._comm)

    def shift(self, tensor: tf.Tensor, offset: int, name: str) -> tf.Tensor:
        target, rows = (self.rank + offset) % self.size, tf.shape(tensor, tf.int64)[0]
        splits = tf.one_hot(target, self.size, rows, tf.zeros_like(rows), dtype=tf.int64)
        return self.all_to_all(tensor, splits, name)[0]

    def all_to_all(
        self, tensor: tf.Tensor, splits: tf.Tensor, name: str, depths: Depths | None = None
    ) -> tuple[tf.Tensor, tf.Tensor]:
        rows, counts = ops.all_to_all(tensor, splits, name=self._key(name), comm=self._comm)
        self._note_depths(rows.op, depths)
        return rows, counts

    def buckets(self, sizes: Sequence[int], dtypes: Sequence[str]) -> list[list[int]]:
        return self._plan(sizes, dtypes)

    def begin_with(self, gathered: tf.Tensor) -> None:
        """Puts an all_gather first in the plan.

        It must have been made before the sums, with the same number of rows on all ranks.
        """
        operation = gathered.op
        if operation.type == "DdlAllGather" and operation.graph is self._graph:
            self._begins_with = operation

    def follow_plan(self) -> None:
        """Gives the collectives their places in the plan, after all are made."""
        in_graph = [each for each in self._graph.get_operations() if self._is_planned(each)]
        sums = self._by_depth(in_graph)
        if sums != in_graph and not can_run(sums):
            sums = in_graph
        planned = sums if self._begins_with is None else [self._begins_with, *sums]
        listed = "\n".join(_agreed(each) for each in planned)
        plan = int.from_bytes(blake2b(listed.encode(), digest_size=8).digest(), "little", signed=True)
        for index, operation in enumerate(planned):
            set_numbers(operation, plan=plan, plan_index=index, plan_size=len(planned))

    def _by_depth(self, sums: Sequence[tf.Operation]) -> list[tf.Operation]:
        """Moves sums, given in an order in which they can run, before sums that they cannot need.

        The buckets of gradients are made last. Left there, they would wait for the last statistic of BatchNormalization
        and all be sent after the backward pass. An operation that needs the result of a sum is deeper than the summed
        tensors. Sums are not moved if branches have collectives: TensorFlow then runs these branches in the order in
        which they are made, not in the program's order.
        """
        if self._is_in_branches:
            return list(sums)
        order: list[tf.Operation] = []
        for each in sums:
            place, depths = len(order), self._depths.get(each.name)
            while depths is not None and place > 0:
                before = self._depths.get(order[place - 1].name)
                if before is None or before.least <= depths.greatest:
                    break
                place -= 1
            order.insert(place, each)
        return order

    def _is_planned(self, operation: tf.Operation) -> bool:
        if operation.type not in ("DdlAllReduceN", "DdlAllToAll"):
            return False
        if not any(each.name == "plan_size" for each in operation.op_def.attr):
            return False  # a library from before exchanges could follow a plan
        communicator, name = (operation.get_attr(each) for each in ("communicator", "tensor_name"))
        is_of_these = communicator == (0 if self._comm is None else self._comm.id)
        return is_of_these and bool(name.decode().startswith(self._prefix))


def can_run(order: Sequence[tf.Operation]) -> bool:
    """Whether operations of one graph can run in this order: whether none needs a later one.

    Depths show only the needs of a program's own nodes; this check also sees operations that a cut has inserted.
    """
    places = {each: place for place, each in enumerate(order)}
    last: dict[tf.Operation, int] = {}  # the last place in `order` of an operation and what it needs; -1: none
    for operation in order[0].graph.get_operations():
        needed = {*operation.control_inputs, *(each.op for each in operation.inputs)}
        if not needed <= last.keys():
            return False  # not made in an order in which they can run
        after, place = max((last[each] for each in needed), default=-1), places.get(operation, -1)
        if operation in places and place < after:
            return False
        last[operation] = max(place, after)
    return True


def _agreed(operation: tf.Operation) -> str:
    """Returns the properties of a planned collective on which ranks must agree."""
    attrs = _SUM_ATTRIBUTES if operation.type == "DdlAllReduceN" else ("tensor_name", "T")
    return f"{operation.type} {' '.join(str(operation.get_attr(each)) for each in attrs)}"
