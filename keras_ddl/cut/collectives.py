"""What moves between ranks: sums in buckets, and gathered rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.program import Node, Value

if TYPE_CHECKING:
    from keras_ddl.cut.report import Report

# What ranks can combine (ops.all_reduce), bools as uint8; of other dtypes there are no parts.
COMBINED_DTYPES = frozenset(
    (tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.int32, tf.int64, tf.uint8, tf.int8, tf.bool)
)


class Collectives(Protocol):
    """What the builder makes collectives with; `name` is the same on all ranks and used once in a step."""

    rank: int
    size: int

    def reduce(self, tensors: Sequence[tf.Tensor], op: str, name: str) -> list[tf.Tensor]:
        """Returns the tensors combined over ranks by `op`; shapes are equal on all ranks."""

    def gather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Returns the ranks' tensors, one after the other along axis 0; their extents there may differ."""

    def reduce_scatter(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Returns this rank's rows of the sum over ranks; the first ranks have one more where they are uneven."""

    def buckets(self, sizes: Sequence[int], dtypes: Sequence[str]) -> list[list[int]]:
        """Groups tensors of so many bytes, in the order in which they become ready."""


class Sums:
    """Values that have to be combined over ranks, collected until all that can be known are.

    Two values collected together do not depend on one another's sums, so they may travel in one bucket.
    """

    def __init__(self, collectives: Collectives, report: Report, scope: str = "") -> None:
        self._scope = scope
        self._collectives = collectives
        self._report = report
        self._wanted: dict[Value, tuple[tf.Tensor, str, Node | None]] = {}
        self._count = 0

    def want(self, value: Value, tensor: tf.Tensor, op: str, reader: Node | None) -> None:
        """Asks for a value, which a later `make` returns."""
        self._wanted.setdefault(value, (tensor, op, reader))

    def __bool__(self) -> bool:
        """Whether any value is asked for."""
        return bool(self._wanted)

    def make(self) -> dict[Value, tf.Tensor]:
        """Makes the collectives for all that was asked for; returns the whole tensors. COLLECTIVE."""
        if not self._wanted:
            raise AssertionError("the cut does not finish: no value is requested, and nodes are left")
        done: dict[Value, tf.Tensor] = {}
        wanted, self._wanted = self._wanted, {}
        order = sorted(wanted, key=lambda value: (value.node.depth, value.node.position))  # as they become ready
        with tf.control_dependencies(None):
            for op in dict.fromkeys(wanted[value][1] for value in order):
                values = [value for value in order if wanted[value][1] == op]
                sizes = [_bytes(value) for value in values]
                for bucket in self._collectives.buckets(sizes, [_numeric_name(value) for value in values]):
                    members = [values[i] for i in bucket]
                    name = f"{self._scope}{op}_{self._count}"
                    self._count += 1
                    found = self._collectives.reduce([_numeric(wanted[value][0]) for value in members], op, name)
                    for value, tensor in zip(members, found):
                        tensor = tf.cast(tensor, tf.bool) if value.dtype == tf.bool else tensor
                        tensor.set_shape(wanted[value][0].shape)
                        done[value] = tensor
                    self._report.reduced(op, members, [wanted[value][2] for value in members])
        return done


def _numeric(tensor: tf.Tensor) -> tf.Tensor:
    return tf.cast(tensor, tf.uint8) if tensor.dtype == tf.bool else tensor


def _numeric_name(value: Value) -> str:
    return "uint8" if value.dtype == tf.bool else value.dtype.name


def _bytes(value: Value) -> int:
    """Bytes as far as they are known: the plan must not depend on the batch."""
    elements = 1
    for extent in value.shape.as_list() if value.rank is not None else []:
        elements *= extent or 1
    return elements * value.dtype.size


class OfRanks:
    """Collectives of the job's ranks (keras_ddl.ops).

    Args:
        scope: begins every name.
        plan: groups tensors, as `Collectives.buckets` does.
    """

    def __init__(self, scope: str, rank: int, size: int, plan: Any) -> None:
        self.rank = rank
        self.size = size
        self._scope = scope
        self._plan = plan

    def reduce(self, tensors: Sequence[tf.Tensor], op: str, name: str) -> list[tf.Tensor]:
        from keras_ddl import ops

        return ops.all_reduce_n(tensors, op=op, name=f"{self._scope}/{name}")

    def gather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        from keras_ddl import ops

        return ops.all_gather(tensor, name=f"{self._scope}/{name}")

    def reduce_scatter(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        from keras_ddl import ops

        return ops.reduce_scatter(tensor, name=f"{self._scope}/{name}")

    def buckets(self, sizes: Sequence[int], dtypes: Sequence[str]) -> list[list[int]]:
        return self._plan(sizes, dtypes)
