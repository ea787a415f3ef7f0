"""Postpones the writes of a step until it commits, so that no rank writes a variable unless all ranks commit.

A value that is assigned to a variable is forwarded inside the step to later readers of the variable. Only the last
value is written, after the commit: a collective that a rank joins when everything else of its step has run. Values are
computed as early as usual, so only the assignments wait.

If the graph does not show that this is equivalent (a loop or a branch that writes, an operation that reads and writes
at once), the variable is written when the program says so, and copied first: `Snapshots` restore it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Sequence

from keras_ddl.communicator.step_names import COMMIT
from keras_ddl.compat import tensorflow as tf_compat
from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.analysis import variable_ops
from keras_ddl.cut.analysis.program import PYTHON_FUNCTIONS, Node, Value
from keras_ddl.cut.analysis.variable_ops import ASSIGN_ADD, ASSIGN_SUB, ASSIGNS, READ, SCATTERS
from keras_ddl.cut.commit.after_commit import AfterCommit
from keras_ddl.cut.commit.blocks import Blocks, New, plan
from keras_ddl.cut.commit.snapshots import Snapshots
from keras_ddl.cut.values.collectives import Collectives
from keras_ddl.cut.values.placed_values import PlacedValues

_TABLE_READS = ("LookupTableFind", "LookupTableFindV2", "LookupTableSize", "LookupTableSizeV2")
# Their effects are in their kernels or outside of the process, so a failed step cannot undo them.
_RANDOM = ("RandomUniform", "RandomUniformInt", "RandomStandardNormal", "TruncatedNormal", "RandomShuffle",
           "Multinomial", "RandomGamma", "RandomPoissonV2", "ParameterizedTruncatedNormal")  # fmt: skip


class Writes:
    """The variables that one step writes.

    Args:
        values: the values of the step.
        snapshots: copies of variables that must be written early.
        mirrored: handles of variables whose new values are needed before the commit.
    """

    def __init__(self, values: PlacedValues, snapshots: Snapshots, mirrored: Sequence[tf.Tensor] = ()) -> None:
        self._b = values
        self._mirrored = {each.ref() for each in mirrored}
        self.snapshots = snapshots
        self.report = values.report
        self._read: dict[Hashable, tf.Tensor] = {}  # by handle: the variable's value before the commit
        self._new: dict[Hashable, tuple[tf.Tensor, tf.Tensor]] = {}  # (handle, value that the variable will hold)
        # (operands, function that builds the operation)
        self._late: list[tuple[list[tf.Tensor], Callable[[], object]]] = []
        self._deferred: set[Node] = set()
        # They may read and write variables that the graph does not show.
        operations = [each for each in values.program.nodes if values.earlier_kind(each) is None]
        self._hosts = [each.position for each in operations if _has_host_function(each.operation)]
        self._early: dict[Hashable, str] = {}  # by handle: the reason to write the variable early
        self._plan()
        self.saved = self.snapshots.close()

    def _plan(self) -> None:
        """Decides for each variable whether its writes can wait."""
        b = self._b
        written: set[Value] = set()
        users: dict[Value, list[Node]] = {}
        handles = {value for value, _ in b.program.captured if value.dtype == tf.resource}
        for node in b.program.nodes:
            for value in dict.fromkeys(each.source() for each in node.inputs):
                if value in handles:
                    users.setdefault(value, []).append(node)
            if node.type in _RANDOM:
                b.report.lasting[node.type] += 1
            elif node.position in self._hosts:
                inside = "" if node.type in PYTHON_FUNCTIONS else f" in {node.type}"
                b.report.lasting[f"Python functions{inside}"] += 1
        for value, nodes in users.items():
            key = b.local(value).ref()
            for place, node in enumerate(nodes):
                if node.type == READ or node.type == "Identity":
                    continue
                if node.type in ASSIGNS and node.inputs[0].source() is value:
                    written.add(value)
                    if self._hosts and self._hosts[-1] > node.position:
                        self._early.setdefault(key, "a Python function may read it")
                elif node.type in _TABLE_READS or not _writes(node, value):
                    if value in written:
                        self._early.setdefault(key, f"{node.type} reads it after it was assigned")
                elif tf_compat.variable_dtype(value.tensor) is None:
                    b.report.lasting[node.type] += 1
                elif node.type in SCATTERS and place == len(nodes) - 1 and key not in self._mirrored:
                    # It has no result and nothing reads the variable meanwhile, so it can run later.
                    self._deferred.add(node)
                else:
                    self._early.setdefault(key, f"{node.type} may write it")
        for value in users:
            key = b.local(value).ref()
            if key in self._early:
                self.snapshots.copy(b.local(value), tf_compat.variable_dtype(value.tensor))
                b.report.copies[self._early[key]] += 1

    def before(self, node: Node) -> list[tf.Operation]:
        """Returns the operations that a node must wait for, because it may write a variable that is copied first."""
        if self.saved is None or not any(each.dtype == tf.resource for each in node.inputs):
            return []
        keys = (self._b.local(each).ref() for each in node.inputs if each.dtype == tf.resource)
        return [self.saved] if any(key in self._early for key in keys) else []

    def make(self, node: Node, inputs: Sequence[tf.Tensor], create: Callable[[], list[tf.Tensor]]) -> list[tf.Tensor]:
        """Returns the outputs of an operation. `create` builds it; if it writes a variable, after the commit."""
        if node in self._deferred:
            self._late.append((list(inputs), create))
            return []
        if node.type != READ and node.type not in ASSIGNS or inputs[0].ref() in self._early:
            return create()
        if node.type == READ:
            if self._hosts and inputs[0].ref() not in self._new:
                return create()
            return [self.value(inputs[0], node.attr("dtype", tf.DType))]
        self.assign(node.type, inputs[0], inputs[1])
        return []

    def scatter_rows(self, node: Node, handle: tf.Tensor, places: tf.Tensor, rows: tf.Tensor, count: int) -> bool:
        """Scatters rows into a variable of `count` rows after the commit (variable_ops.scatter_rows).

        Returns False if TensorFlow's operation on variables must do it: earlier, or on a GPU, where rows of one place
        would be added up in any order. The step fails before the commit if a place does not exist.
        """
        fits = count <= tf.int32.max  # the type of places in operations that work in place
        if node not in self._deferred or not fits or tf.config.get_visible_devices("GPU"):
            return False
        exist = tf.reduce_all((places >= 0) & (places < count))
        problem = f"a place of rows to be scattered is not in [0, {count}), this rank's rows:"
        tf.raw_ops.Assert(condition=exist, data=[problem, places])
        create = functools.partial(variable_ops.scatter_rows, node.type, handle, places, rows)
        self._late.append(([handle, places, rows], create))
        return True

    def value(self, handle: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
        """Returns the value of a variable at this point of the step."""
        key = handle.ref()
        if key in self._new:
            return self._new[key][1]
        if self._hosts:
            return variable_ops.read(handle, dtype)
        if key not in self._read:
            with tf.control_dependencies(None):  # it is the same until the commit
                self._read[key] = variable_ops.read(handle, dtype)
        return self._read[key]

    def is_early(self, handle: tf.Tensor) -> bool:
        """Whether a variable is written when the program says so."""
        return handle.ref() in self._early

    def is_assigned(self, handle: tf.Tensor) -> bool:
        """Whether a variable will be written after the commit, with the value that `value` returns now."""
        return handle.ref() in self._new

    def assign(self, kind: str, handle: tf.Tensor, value: tf.Tensor) -> None:
        """Records the value that a variable will hold; `kind`: one of ASSIGNS."""
        if kind == ASSIGN_ADD:
            value = variable_ops.sum_of(self.value(handle, value.dtype), value)
        elif kind == ASSIGN_SUB:
            value = variable_ops.difference_of(self.value(handle, value.dtype), value)
        self._new[handle.ref()] = handle, value

    def values(self) -> list[tf.Tensor]:
        """Returns the values that variables will be assigned, in order."""
        return [value for _, value in self._new.values()]

    def needed(self) -> list[tf.Tensor]:
        return [*self.values(), *self.scattered()]

    def scattered(self) -> list[tf.Tensor]:
        """Returns the operands of operations that scatter rows after the commit."""
        return [each for inputs, _ in self._late for each in inputs]

    def in_blocks(self, after: AfterCommit) -> list[Blocks]:
        """Returns the variables that can be updated in blocks after the commit."""
        graph = tf.compat.v1.get_default_graph()
        some = [(key, *each) for key, each in self._new.items() if each[1] in after]
        return plan(after, [New(graph.capture(handle), value, key) for key, handle, value in some])

    def make_all(
        self, committed: tf.Operation, after: AfterCommit | None = None, in_blocks: Sequence[Blocks] = ()
    ) -> None:
        """Writes everything, after `committed`. after: operations that compute values then, one at a time."""
        written: dict[Hashable, tf.Operation] = {}
        previous = committed
        for each in in_blocks:
            made = each.make(previous)
            written.update(made)
            with tf.control_dependencies(None):
                previous = tf.group(*made.values())
        with tf.control_dependencies(None), tf.control_dependencies([committed]):
            for key, (handle, value) in self._new.items():
                if key in written:
                    continue
                is_late = after is not None and after.follow(previous, value)
                written[key] = variable_ops.assign(handle, value)
                previous = written[key] if is_late else previous
            for inputs, create in self._late:
                before = [written[key] for key in (inputs[0].ref(),) if key in written]
                with tf.control_dependencies(before):
                    create()
            self.snapshots.forget(committed)


def commit(
    writes: Writes, collectives: Collectives, outputs: Sequence[tf.Tensor], after: AfterCommit | None = None
) -> None:
    """Builds the end of a step: a rank writes when all ranks have run everything else. COLLECTIVE.

    after: the operations that run after the commit.
    """
    needed, late, in_blocks = writes.needed(), [], list[Blocks]()
    if after is not None:
        in_blocks = writes.in_blocks(after)
        for each in in_blocks:
            each.check()
        needed, late = [*(each for each in needed if each not in after), *after.operands()], after.gathers()
    with tf.control_dependencies(None), tf.control_dependencies(everything_before(needed, outputs, late)):
        ready = tf.identity(tf.constant([0], tf.int32))
    with tf.control_dependencies(None):
        committed = collectives.reduce([ready], "max", COMMIT)[0].op
    writes.report.commits = True
    writes.make_all(committed, after, in_blocks)


def everything_before(
    needed: Sequence[tf.Tensor], outputs: Sequence[tf.Tensor], late: Sequence[tf.Operation] = ()
) -> list[tf.Operation]:
    """Returns the operations after which a step has run everything but its commit, as far as it is built.

    Args:
        needed: values that must have been computed, besides the outputs.
        late: operations that run after the commit.
    """
    names = {each.name for each in late}
    graph = tf.compat.v1.get_default_graph()
    values = [each for each in [*outputs, *needed] if isinstance(each, tf.Tensor)]
    before = [each.op for each in values if not tf_compat.is_eager(each) and each.graph is graph]
    stateful = [each for each in graph.get_operations() if tf_compat.is_stateful(each) and each.type not in _IDLE]
    return _ends([*before, *(each for each in stateful if each.name not in names)])


# They do nothing unless something reads them; waiting for them would make them run.
_IDLE = (READ, "Placeholder", "VarHandleOp")


def _ends(needed: Iterable[tf.Operation]) -> list[tf.Operation]:
    """Returns the operations that no other given operation needs."""
    stack, seen, inner = list(dict.fromkeys(needed)), set(), set()
    ends = list(stack)
    while stack:
        operation = stack.pop()
        if operation in seen:
            continue
        seen.add(operation)
        for each in (*(tensor.op for tensor in operation.inputs), *operation.control_inputs):
            inner.add(each)
            if each not in seen:
                stack.append(each)
    return [each for each in ends if each not in inner and each.type != "Placeholder"]


def _has_host_function(operation: tf.Operation) -> bool:
    """Whether an operation, or a branch or a loop's body of it, calls Python."""
    if operation.type in PYTHON_FUNCTIONS:
        return True
    graphs = tf_compat.graphs_of(operation)
    return any(_has_host_function(each) for graph in graphs for each in graph.get_operations())


def _writes(node: Node, value: Value) -> bool:
    """Whether an operation may write a variable."""
    written = {id(each) for each in tf_compat.written_resources(node.operation)}
    places = [i for i, each in enumerate(node.inputs) if each.source() is value]
    return any(id(node.operation.inputs[place]) in written for place in places)
