"""Finds BatchNormalization's statistics, and their gradients, in a traced step (batch_statistics="rank").

With its own statistics, a rank computes the results of one process whose batch is the rank's rows. This module
finds the calls of layers for which every forward and backward operation can be built in this way (`Role`). In each
call, a value is of one of four kinds (`ValueKind`). If the module does not understand an operation of a call, the call
keeps the statistics of the global batch. That is always right, so second gradients, loops, branches and code that uses
the moments are safe.

How it finds a call: the traceback of its mean shows a Mean that Keras's `BatchNormalization._moments` made, and its
variance is another Mean, of squared deviations from the first. Names show where its other operations are: in the
layer's scope around the moments, and in "gradient_tape/" before that scope, where tf.GradientTape puts the gradients of
the scope's operations. Names are only compared with each other, because ranks may number layers differently.

This is correct, because every operation of the backward pass belongs to the gradient of one forward operation on these
values. Built from a rank's rows and the rank's own values, the operation is the one that a process with these rows as
its batch would build. The only difference is the number of rows by which the gradient of a mean is divided; see
`Role.SPREAD`.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from keras_ddl.compat import keras as keras_compat
from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.analysis.program import SHAPE_OPS, Node, Program, Value
from keras_ddl.cut.operations.factors import Kind, kind_of, spec_of

_TAPE = "gradient_tape/"
_RESHAPES = ("Squeeze", "Reshape", "ExpandDims")


class ValueKind(enum.Enum):
    """The kind of a value in a call, and its placement in the rest of the step."""

    ROWS = "has the shape of the layer's input x, and is sharded like x"
    OWN = "computed from a rank's own moments: mean, variance, 1/deviation. Partial: the mean over ranks, by rows"
    SUM = "a sum over the rank's rows: the gradient of an OWN value, gamma or beta. Partial: the sum over ranks"
    REPLICATED = "anything else"


ROWS, OWN, SUM, REPLICATED = ValueKind


class Role(enum.Enum):
    """The way in which a rank builds an operation of a call."""

    MOMENT = "the mean or the variance of the rank's rows"
    SUM = "a sum over the rank's rows"
    SPREAD = "the gradient of a mean, before it is divided by the number of all rows: a sum repeated for each row"
    UPDATE = "the new part of a moving statistic: the mean over ranks, times a constant"
    SAME = "the same operation of the rank's operands"


@dataclass(eq=False)
class Call:
    """One call of a layer.

    Attributes:
        x: the value that it normalizes.
        mean, variance: the operations that compute its moments.
        scope, backward: prefixes of the names of its operations, and of their gradients.
        layer: the handle of the layer's moving mean; None: not found yet.
        kinds: kinds of values whose shape does not show the kind.
        roles: roles of its operations.
    """

    x: Value
    mean: Node
    variance: Node
    scope: str
    backward: str
    layer: Value | None = None
    kinds: dict[Value, ValueKind] = field(default_factory=dict)
    roles: dict[Node, Role] = field(default_factory=dict)

    @property
    def moment(self) -> Value:
        return self.mean.outputs[0]

    def kind(self, value: Value) -> ValueKind | None:
        """Returns the kind of a value in this call; None if it is not known and the shape does not show it."""
        if value in self.kinds:
            return self.kinds[value]
        if self.is_like_rows(value):
            return ROWS
        return REPLICATED if value.shape.is_fully_defined() else None

    def is_like_rows(self, value: Value) -> bool:
        return value.rank == self.x.rank and bool(value.shape.as_list() == self.x.shape.as_list())

    def is_statistic(self, value: Value) -> bool:
        """Whether a value has one entry for each entry of the mean."""
        is_known: bool = value.shape.is_fully_defined()
        return is_known and bool(value.shape.num_elements() == self.moment.shape.num_elements())

    def is_repeated_along_rows(self, value: Value) -> bool:
        """Whether broadcasting against x repeats a value along every axis that the moments are taken over."""
        mean = self.moment.shape.as_list()
        own = value.shape.as_list()
        shape = [1] * (len(mean) - len(own)) + own
        return len(shape) == len(mean) and all(mine == 1 for mine, entry in zip(shape, mean) if entry == 1)


def find(program: Program) -> tuple[list[Call], int]:
    """Returns the calls that can use each rank's own statistics, and the number of calls that cannot.

    All calls of a layer use the same kind of statistics.
    """
    calls = [call for node in program.nodes for call in [_call_of(program, node)] if call is not None]
    candidates = _candidates(program, calls)
    layers: dict[Value | None, list[Call]] = {}
    understood = {call for call in calls if _understand(program, call, candidates[call])}
    for call in calls:
        layers.setdefault(call.layer, []).append(call)
    result = [call for call in calls if call.layer is not None and understood.issuperset(layers[call.layer])]
    return result, len(calls) - len(result)


def _call_of(program: Program, mean: Node) -> Call | None:
    if mean.type != "Mean" or not mean.attr("keep_dims", bool):
        return None
    x, moment = mean.inputs[0], mean.outputs[0]
    squares = [
        node
        for stopped in _readers(program, moment, "StopGradient")
        for node in _readers(program, stopped.outputs[0], "SquaredDifference")
        if node.inputs[0] is x and node.inputs[1] is stopped.outputs[0]
    ]
    variances = [node for square in squares for node in _readers(program, square.outputs[0], "Mean")]
    if len(variances) != 1 or not moment.shape.is_fully_defined() or not x.dtype.is_floating:
        return None
    if x.rank is None or x.shape.as_list() == moment.shape.as_list() or variances[0].outputs[0].shape != moment.shape:
        return None
    if not all(keras_compat.is_batch_moment(node.operation.traceback) for node in (mean, variances[0])):
        return None
    name = mean.operation.name
    call, scope = mean.key[: len(mean.key) - len(name)], "/".join(name.split("/")[:-2])  # <scope>/moments/mean
    if not scope:
        return None
    return Call(x, mean, variances[0], f"{call}{scope}/", f"{call}{_TAPE}{scope}/")


def _readers(program: Program, value: Value, operation_type: str) -> list[Node]:
    return [node for node in program.readers(value) if node.type == operation_type]


def _candidates(program: Program, calls: Sequence[Call]) -> dict[Call, list[Node]]:
    """Returns the operations of each call's scopes, and sums of several gradients, in an order in which they can run.

    The tape gives sums of several gradients names outside of the scopes.
    """
    scopes = {scope: call for call in calls for scope in (call.scope, call.backward)}
    owners: dict[Node, Call] = {}
    result: dict[Call, list[Node]] = {call: [] for call in calls}
    for node in program.nodes:
        ends = [place + 1 for place, letter in enumerate(node.key) if letter == "/"]
        scope = next((node.key[:end] for end in reversed(ends) if node.key[:end] in scopes), None)
        if scope is not None:
            owners[node] = scopes[scope]
            result[scopes[scope]].append(node)
        elif node.type == "AddN":
            for call in dict.fromkeys(owners[each.node] for each in node.inputs if each.node in owners):
                result[call].append(node)
    return result


def _understand(program: Program, call: Call, candidates: Sequence[Node]) -> bool:
    """Sets the roles of a call's operations. Returns whether all operations on OWN values have a role."""
    variance = call.variance.outputs[0]
    call.kinds[call.moment] = call.kinds[variance] = OWN
    call.roles[call.mean] = call.roles[call.variance] = Role.MOMENT
    updates: set[Node] = set()
    for node in candidates:
        if node in call.roles or node in updates or node.type in SHAPE_OPS:
            continue
        update = _moving_average(program, call, node)
        if update:
            call.roles[node] = Role.UPDATE
            updates.update(update)
            continue
        kinds = [call.kind(value) for value in node.inputs]
        if OWN not in kinds and SUM not in kinds:
            is_sum = node.type == "Sum" and kinds[0] == ROWS and node.key.startswith(call.backward)
            if is_sum and not _understand_sum(program, call, node):
                return False
        elif not _uses_global_sums(program, call, node, kinds):
            result = _result_kind(program, call, node, kinds)
            if result is None:
                return False
            is_spread = node.type in ("Tile", "BroadcastTo")
            call.roles[node], call.kinds[node.outputs[0]] = Role.SPREAD if is_spread else Role.SAME, result
    if call.layer is None:
        return False
    known = {*call.roles, *updates}
    return all(
        reader in known or reader.type in SHAPE_OPS
        for value, kind in call.kinds.items()
        if kind == OWN
        for reader in program.readers(value)
    )


def _uses_global_sums(program: Program, call: Call, node: Node, kinds: Sequence[ValueKind | None]) -> bool:
    """Whether an operation uses sums over all ranks, as the rest of the step does."""
    if node.type == "AddN":  # e.g. the sum of gradients of gamma
        return not any(each.key.startswith(call.backward) for each in program.readers(node.outputs[0]))
    # The gradient of a float16 gamma is rounded after it was summed.
    return node.type == "Cast" and kinds == [SUM] and node.outputs[0].dtype.size < node.inputs[0].dtype.size


def _moving_average(program: Program, call: Call, node: Node) -> list[Node] | None:
    """Returns the operations that make a new moving statistic from a rank's own statistic, if `node` is the first one.

    The new value is m * constant + old * constant. This is linear in m, so the mean over ranks may be taken first.
    """
    if node.type != "Mul" or [call.kinds.get(each) for each in node.inputs] != [OWN, None]:
        return None
    if not node.key.startswith(call.scope) or node.inputs[1].constant() is None or node.inputs[1].rank != 0:
        return None
    result = [node]
    for place, kind in enumerate(("AddV2", "Cast", "AssignVariableOp")):
        readers = program.readers(result[-1].outputs[0])
        if len(readers) != 1:
            return None
        if readers[0].type != kind:
            if kind == "Cast":
                continue
            return None
        result.append(readers[0])
        if place == 0 and any(each in call.kinds for each in readers[0].inputs):
            return None
    handle = result[-1].inputs[0]
    if node.inputs[0] is call.moment or _is_same_entries(node.inputs[0], call.moment):
        call.layer = handle
    return result


def _keeps_entries(node: Node) -> bool:
    """Whether the result has the entries of the first operand in the same order."""
    return kind_of(node) is Kind.FORWARD or node.type in _RESHAPES


def _is_same_entries(value: Value, of: Value) -> bool:
    while value is not of:
        if not _keeps_entries(value.node):
            return False
        value = value.node.inputs[0]
    return True


def _understand_sum(program: Program, call: Call, node: Node) -> bool:
    """Sets the role of a sum over rows in the gradients, and returns whether it can.

    If the axes are unknown until the step runs, the next Reshape shows them.
    """
    output = node.outputs[0]
    if output.shape.is_fully_defined():
        results = [output]
    else:
        readers = program.readers(output)
        if not readers or any(each.type != "Reshape" for each in readers):
            return False
        results = [each.outputs[0] for each in readers]
        if all(call.is_like_rows(each) for each in results):
            return True  # a sum along no axis: rows, by themselves
    if not all(call.is_statistic(each) for each in results):
        return False
    call.kinds[output], call.roles[node] = SUM, Role.SUM
    return True


def _result_kind(program: Program, call: Call, node: Node, kinds: Sequence[ValueKind | None]) -> ValueKind | None:
    """Returns the kind of an operation's result, if the rank's operands give the rank's result; otherwise None."""
    if None in kinds or len(node.outputs) != 1 or not node.outputs[0].dtype.is_floating:
        return None
    output = node.outputs[0]
    if node.type in ("Tile", "BroadcastTo"):
        return ROWS if _is_gradient_of_mean(program, call, node, kinds) else None
    if _keeps_entries(node):
        others_are_replicated = all(each == REPLICATED for each in kinds[1:])
        is_same = kinds[0] in (OWN, SUM) and call.is_statistic(output) and others_are_replicated
        return kinds[0] if is_same else None
    if kind_of(node) is not Kind.ENTRYWISE:
        return None
    if ROWS in kinds:
        others = [value for value, kind in zip(node.inputs, kinds) if kind != ROWS]
        is_by_row = SUM not in kinds and call.is_like_rows(output) and all(map(call.is_repeated_along_rows, others))
        return ROWS if is_by_row else None
    if not call.is_statistic(output):
        return None
    if SUM not in kinds:
        return OWN
    return SUM if _is_linear(node, [place for place, kind in enumerate(kinds) if kind == SUM]) else None


def _is_linear(node: Node, places: Sequence[int]) -> bool:
    """Whether an operation is linear in the operands at these places if the other operands are fixed."""
    spec = spec_of(node)
    if spec.linear.together:
        return len(places) == len(node.inputs)
    is_rounded = any(each.dtype != node.outputs[0].dtype for each in node.inputs)
    return len(places) == 1 and places[0] in spec.linear.at and not is_rounded


def _is_gradient_of_mean(program: Program, call: Call, node: Node, kinds: Sequence[ValueKind | None]) -> bool:
    """Whether a sum is repeated for every row, and then divided by the number of rows of the global batch."""
    if kinds != [SUM, REPLICATED] or not call.is_like_rows(node.outputs[0]) or not node.key.startswith(call.backward):
        return False
    if not call.is_repeated_along_rows(node.inputs[0]):
        return False
    readers = program.readers(node.outputs[0])
    if len(readers) != 1 or readers[0].type != "RealDiv":
        return False
    divided, count = readers[0].inputs
    return divided is node.outputs[0] and _is_count(call, count)


def _is_count(call: Call, value: Value) -> bool:
    """Whether a scalar is the number of x's entries per entry of the mean, as the gradient of Mean computes it."""
    constant = value.constant()
    if constant is not None:
        entries = call.x.shape.num_elements()
        return entries is not None and constant == entries / max(call.moment.shape.num_elements(), 1)
    for kind in ("Cast", "Prod", "GatherV2"):  # of the extents along the axes
        if value.node.type != kind:
            return False
        value = value.node.inputs[0]
    return value.node.type == "Shape" and value.dtype in (tf.int32, tf.int64) and _is_rows_of(call, value.node)


def _is_rows_of(call: Call, shape: Node) -> bool:
    return shape.inputs[0] is call.x or shape.inputs[0] is call.variance.inputs[0]
