"""The collectives of a step: sums in buckets, and gathers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from hashlib import blake2b
from typing import Protocol

from keras_ddl import ops
from keras_ddl.compat.tensorflow import set_numbers, tf
from keras_ddl.cut.program import Node, Value
from keras_ddl.cut.report import Report
from keras_ddl.cut.weight_gradients import is_weight_gradient

# What ranks can combine (ops.all_reduce), bools as uint8; of other dtypes there are no parts.
COMBINED_DTYPES = frozenset(
    (tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.int32, tf.int64, tf.uint8, tf.int8, tf.bool)
)


class Collectives(Protocol):
    """Puts collectives into the graph; `name` is the same on all ranks and used once in a step."""

    rank: int
    size: int

    def reduce(self, tensors: Sequence[tf.Tensor], op: str, name: str, *, compressed: bool = False) -> list[tf.Tensor]:
        """Returns the tensors combined over ranks by `op`; shapes are equal on all ranks."""

    def compresses(self, value: Value, op: str) -> bool:
        """Whether `value` is to be reduced with `compressed`: rounded between hosts."""

    def gather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Returns the ranks' tensors, one after the other along axis 0; their extents there may differ."""

    def reduce_scatter(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Returns this rank's rows of the sum over ranks; the first ranks have one more where they are uneven."""

    def buckets(self, sizes: Sequence[int], dtypes: Sequence[str]) -> list[list[int]]:
        """Groups tensors of so many bytes, in the order in which they become ready."""


class Sums:
    """Requests for sums over ranks, collected until nothing else can be built.

    Two values collected together do not depend on one another's sums, so they may travel in one bucket.
    """

    def __init__(self, collectives: Collectives, report: Report, scope: str = "") -> None:
        self._scope = scope
        self._collectives = collectives
        self._report = report
        self._wanted: dict[Value, tuple[tf.Tensor, str, Node | None]] = {}
        self._count = 0

    def want(self, value: Value, tensor: tf.Tensor, op: str, reader: Node | None) -> None:
        """Requests the sum of a value, which a later `make` returns."""
        self._wanted.setdefault(value, (tensor, op, reader))

    def __bool__(self) -> bool:
        """Whether any value is requested."""
        return bool(self._wanted)

    def make(self, rounds: int = 0) -> dict[Value, tf.Tensor]:
        """Makes the collectives for all requests; returns the replicated tensors. COLLECTIVE.

        `rounds`: of collectives that were made before, and that these may wait for.
        """
        if not self._wanted:
            raise AssertionError("the cut does not finish: no value is requested, and nodes are left")
        done: dict[Value, tf.Tensor] = {}
        wanted, self._wanted = self._wanted, {}
        order = sorted(wanted, key=lambda value: (value.node.depth, value.node.position))  # as they become ready
        with tf.control_dependencies(None):
            kinds = {value: (op, self._collectives.compresses(value, op)) for value, (_, op, _) in wanted.items()}
            for op, compressed in dict.fromkeys(kinds[value] for value in order):
                values = [value for value in order if kinds[value] == (op, compressed)]
                sizes = [_bytes(value) for value in values]
                for bucket in self._collectives.buckets(sizes, [_numeric_name(value) for value in values]):
                    members = [values[i] for i in bucket]
                    name = f"{self._scope}{after(rounds)}{op}_{self._count}"
                    self._count += 1
                    parts = [_numeric(wanted[value][0]) for value in members]
                    options = {"compressed": True} if compressed else {}
                    result = self._collectives.reduce(parts, op, name, **options)
                    for value, tensor in zip(members, result):
                        tensor = tf.cast(tensor, tf.bool) if value.dtype == tf.bool else tensor
                        tensor.set_shape(wanted[value][0].shape)
                        done[value] = tensor
                    self._report.reduced(op, members, [wanted[value][2] for value in members], compressed)
        return done


def after(rounds: int) -> str:
    """Returns the prefix of names of collectives made after so many rounds.

    It shows in a timeline which of them may have waited for others (keras_ddl/timeline/waits.py).
    """
    return f"after_{rounds}/" if rounds else ""


def _numeric(tensor: tf.Tensor) -> tf.Tensor:
    return tf.cast(tensor, tf.uint8) if tensor.dtype == tf.bool else tensor


def _numeric_name(value: Value) -> str:
    return "uint8" if value.dtype == tf.bool else value.dtype.name


def _bytes(value: Value) -> int:
    """Bytes as far as they are known: the plan must not depend on the batch."""
    elements = 1
    for extent in value.shape.as_list() if value.rank is not None else []:
        elements *= extent or 1
    width: int = value.dtype.size
    return elements * width


class StepCollectives:
    """Collectives of the job's ranks (keras_ddl.ops), for the step that the current graph is.

    Sums that run whenever the step does make up its plan, in the order in which they were made: none needs a later one.
    Ranks then run them in that order, without asking rank 0 (native/core/src/engine/plan_lane.h). Those inside of
    branches may not run, and are matched by name.

    Args:
        scope: begins every name.
        plan: groups tensors, as `Collectives.buckets` does.
        compression: of the gradients of weights whose shapes are `weights`, or None; see `ops.all_reduce_n`.
        feedback: begins the keys under which their rounding errors are kept; those of programs that reduce the same
            gradients in the same order, such as a last batch of fewer rows, may be one.
    """

    def __init__(
        self,
        scope: str,
        rank: int,
        size: int,
        plan: Callable[[Sequence[int], Sequence[str]], list[list[int]]],
        *,
        compression: str | None = None,
        weights: Collection[tuple[int, ...]] = (),
        feedback: str = "",
    ) -> None:
        self.rank = rank
        self.size = size
        self._scope = scope
        self._plan = plan
        self._compression = compression
        self._weights = weights
        self._feedback = feedback
        self._compressed = 0
        self._graph = tf.compat.v1.get_default_graph()
        self._planned: dict[tf.Operation, str] = {}  # with what ranks must agree on

    def reduce(self, tensors: Sequence[tf.Tensor], op: str, name: str, *, compressed: bool = False) -> list[tf.Tensor]:
        compression = feedback = None
        if compressed:
            compression, feedback = self._compression, f"{self._feedback}/{self._compressed}"
            self._compressed += 1
        result = ops.all_reduce_n(
            tensors, op=op, name=f"{self._scope}/{name}", compression=compression, feedback=feedback
        )
        if tf.compat.v1.get_default_graph() is self._graph:
            for each in result:
                if each.op.type == "DdlAllReduceN":
                    self._planned[each.op] = (
                        f"{each.op.get_attr('tensor_name')} {op} {each.dtype.name} {compression} {feedback}"
                    )
        return result

    def compresses(self, value: Value, op: str) -> bool:
        return self._compression is not None and op == "sum" and is_weight_gradient(value, self._weights)

    def gather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        return ops.all_gather(tensor, name=f"{self._scope}/{name}")

    def reduce_scatter(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        return ops.reduce_scatter(tensor, name=f"{self._scope}/{name}")

    def buckets(self, sizes: Sequence[int], dtypes: Sequence[str]) -> list[list[int]]:
        return self._plan(sizes, dtypes)

    def begin_with(self, gathered: tf.Tensor) -> None:
        """Puts an all_gather made before the sums, of equally many rows on every rank, first in the plan."""
        operation = gathered.op
        if operation.type == "DdlAllGather" and operation.graph is self._graph:
            self._planned[operation] = f"{operation.get_attr('tensor_name')} all_gather {gathered.dtype.name}"

    def follow_plan(self) -> None:
        """Gives the collectives their places in the plan, when all are made."""
        listed = "\n".join(self._planned.values())
        plan = int.from_bytes(blake2b(listed.encode(), digest_size=8).digest(), "little", signed=True)
        for index, operation in enumerate(self._planned):
            set_numbers(operation, plan=plan, plan_index=index, plan_size=len(self._planned))
