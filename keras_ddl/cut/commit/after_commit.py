"""Postpones computations that only writes need until after the commit, so that new values never all exist at once.

A step writes nothing before it commits (writes.py), and its new values would fill memory until then, beside the old
ones: with Adam, all weights and slots twice. But operations that only writes need and that cannot fail on any value may
run after the commit: the arithmetic of optimizers, and products that give gradients, if no collective follows. They
then run variable by variable, and an old value is freed before the next new value is made. Variables in large shards
are updated in blocks (blocks.py).

A product that is smaller than its operands still runs before the commit, because it frees them.

In a job that ends when a rank is lost, gathers whose results only writes need (of new weights from flat shards) wait,
too, because nothing else can make a gather fail. Whether a gather waits depends on the readers of its result and on
global shapes, so all ranks decide in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from keras_ddl.compat.tensorflow import add_control_input, is_eager, is_stateful, tf
from keras_ddl.cut.analysis.entrywise_types import BINARY, UNARY
from keras_ddl.cut.analysis.work import bytes_of

# Operations that fail on no value. (Divisions of integers do.)
ENTRYWISE = {*UNARY, *BINARY, "AddN", "Select"}
# Products and sums that compute gradients. If the number of rows is unknown, all their operands have the rows of the
# same batch.
_OVER_ROWS = {"MatMul", "BatchMatMul", "BatchMatMulV2", "Einsum", "Conv2DBackpropFilter", "Sum"}
_OTHERS = {*_OVER_ROWS, "Transpose", "Reshape", "Squeeze", "ExpandDims", "Identity", "Fill", "BroadcastTo"}
_GATHER = "DdlAllGather"
_SMALL = 1 << 16  # bytes of a tensor; smaller ones are not worth it


class AfterCommit:
    """The operations of the current graph that will run after the commit.

    Args:
        values: the values that variables will be assigned, in that order.
        outputs: what the step returns.
        gathers: whether gathers may wait.
    Attributes: operations: by name, in the order in which they were made.
    """

    def __init__(self, values: Sequence[tf.Tensor], outputs: Iterable[tf.Tensor], *, gathers: bool = False) -> None:
        graph = tf.compat.v1.get_default_graph()
        self.operations: dict[str, tf.Operation] = {}
        operations = graph.get_operations()
        wanted = {each.op.name for each in values if not is_eager(each) and each.graph is graph}
        returned = {each.op.name for each in outputs if not is_eager(each)}
        self._readers: dict[str, list[str]] = {}
        for each in operations:
            for before in (*(tensor.op for tensor in each.inputs), *each.control_inputs):
                self._readers.setdefault(before.name, []).append(each.name)
        for each in reversed(operations):
            others = self.readers(each)
            is_alone = all(name in self.operations for name in others) and (others or each.name in wanted)
            if is_alone and each.name not in returned and (_may_wait(each) or gathers and each.type == _GATHER):
                self.operations[each.name] = each
        self.operations = dict(reversed(self.operations.items()))
        for each in list(self.operations.values()):
            if each.type != _GATHER and not self._inside(each) and bytes_of(_made_for(each)) > bytes_of(each.outputs):
                del self.operations[each.name]

    def __contains__(self, tensor: tf.Tensor) -> bool:
        return not is_eager(tensor) and tensor.op.name in self.operations

    def readers(self, operation: tf.Operation) -> list[str]:
        """Returns the names of the operations that need a result of an operation of the graph."""
        return self._readers.get(operation.name, [])

    def add(self, operation: tf.Operation) -> None:
        """Makes an operation wait as well. REQUIRES: these operations alone need it, and it cannot fail."""
        self.operations[operation.name] = operation

    def forget(self, name: str) -> None:
        """Leaves out an operation that nothing needs any longer."""
        self.operations.pop(name, None)

    def needed(self, value: tf.Tensor) -> dict[str, tf.Operation]:
        """Returns those of these operations that a value needs, by name."""
        own: dict[str, tf.Operation] = {}
        stack = [value.op] if value in self else []
        while stack:
            operation = stack.pop()
            if operation.name not in own:
                own[operation.name] = operation
                stack += [each.op for each in operation.inputs if each.op.name in self.operations]
        return own

    def gathers(self) -> list[tf.Operation]:
        return [each for each in self.operations.values() if each.type == _GATHER]

    def operands(self) -> list[tf.Tensor]:
        """Returns the operands of these operations that are computed before the commit."""
        return [each for one in self.operations.values() for each in one.inputs if each not in self]

    def follow(self, previous: tf.Operation, value: tf.Tensor) -> bool:
        """Makes the operations that a value needs, and that no earlier value needed, run after `previous`. Returns
        False if there are none."""
        own = self.needed(value)
        for each in own.values():
            self.forget(each.name)
            if not any(tensor.op.name in own for tensor in each.inputs):
                add_control_input(each, previous)
        return bool(own)

    def _inside(self, operation: tf.Operation) -> bool:
        """Whether the operation needs others of these operations."""
        return any(each.op.name in self.operations for each in operation.inputs)


def _may_wait(operation: tf.Operation) -> bool:
    kind = operation.type
    if is_stateful(operation) or kind not in ENTRYWISE and kind not in _OTHERS or operation.control_inputs:
        return False
    if kind not in _OVER_ROWS and not all(each.shape.is_fully_defined() for each in operation.inputs):
        return False  # whether it fails may depend on the extents
    return (
        all(
            (each.dtype.is_floating or each.dtype == tf.bool) and each.shape.is_fully_defined()
            for each in operation.outputs
        )
        and bytes_of(operation.outputs) >= _SMALL
    )


def _made_for(operation: tf.Operation) -> list[tf.Tensor]:
    """Returns the operands that are freed by running the operation; variables are not."""
    return [each for each in {id(each): each for each in operation.inputs}.values() if each.op.type not in _LASTING]


_LASTING = ("ReadVariableOp", "Const", "Placeholder")
