"""Finds BatchNormalization's statistics, and their gradients, in a traced step (batch_statistics="rank").

With statistics of its own a rank computes what one process computes whose batch is the rank's rows. Here the program
is searched for the calls of layers for which that can be done throughout, forward and backward. What is not provably
safe is left as it is, which is right for one process. Three kinds of values matter, seen from one call:

    rows   has the shape of the layer's input x, and is sharded as x is.
    own    computed from a rank's own moments: mean, variance, 1/deviation. To the rest of the step its value is the
           mean over ranks, weighted by rows.
    sums   the loss's gradient for an own value, or this rank's part of that for gamma or beta: a sum over the rank's
           rows. To the rest of the step its value is the sum over ranks.

How a call is found: a Mean that Keras's `BatchNormalization._moments` made, as the traceback of the operation says, of
which another Mean, of squared deviations, is the variance. Names tell where its other operations are: in the layer's
scope around the moments, and in "gradient_tape/" before that scope, where tf.GradientTape puts the gradients of the
scope's operations. Names are only compared with one another, as ranks may number layers differently. Then all that
reads an own value has to be understood, or the call is left as it is: that is what makes a further gradient, a loop, a
branch, or own code that uses the moments safe.

Every operation of the backward pass is a part of the gradient of one forward operation of these values. So if it is
made from a rank's rows and a rank's own values, it is what one process makes whose batch is these rows; but for the
number of rows by which the gradient of a mean is divided: see `SPREAD`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from keras_ddl.compat import keras as keras_compat
from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.dims import complete
from keras_ddl.cut.factors import Kind, kind_of, spec_of
from keras_ddl.cut.program import SHAPE_OPS, Node, Program, Value

_TAPE = "gradient_tape/"
_RESHAPES = ("Squeeze", "Reshape", "ExpandDims")

ROWS, OWN, SUMS, REPLICATED = "rows", "own", "sums", "replicated"

# Parts that an operation can have in a call.
MEAN, VARIANCE = "mean", "variance"  # of the rank's rows
VALUE = "value"  # an own value of own and replicated ones
SUM = "sum"  # over the rank's rows
TERM = "term"  # a sum of sums, or of a sum and own and replicated values
ROW = "row"  # rows of rows and own and replicated values
UPDATE = "update"  # the mean over ranks, times a constant: the new part of a moving statistic
SPREAD = "spread"  # the gradient of a mean, before it is divided by the number of all rows: rows of a sum


@dataclass(eq=False)
class Call:
    """One call of a layer. `kinds`: of the values that are not replicated; `parts`: what its operations are."""

    x: Value
    mean: Node
    variance: Node
    scope: str
    backward: str
    layer: Value | None = None  # the handle of the layer's moving mean
    kinds: dict[Value, str] = field(default_factory=dict)
    parts: dict[Node, str] = field(default_factory=dict)

    def kind(self, value: Value) -> str | None:
        """Returns what a value is to this call; None where its shape does not tell."""
        if value in self.kinds:
            return self.kinds[value]
        if self.is_like_rows(value):
            return ROWS
        return REPLICATED if value.shape.is_fully_defined() else None

    def is_like_rows(self, value: Value) -> bool:
        return value.rank == self.x.rank and bool(value.shape.as_list() == self.x.shape.as_list())

    def is_statistic(self, value: Value) -> bool:
        """Whether a value has one entry for each of the mean's."""
        is_known: bool = value.shape.is_fully_defined()
        return is_known and bool(value.shape.num_elements() == _moment(self).shape.num_elements())

    def is_repeated_along_rows(self, value: Value) -> bool:
        """Whether broadcasting against x repeats a value along every axis that the moments are taken over."""
        mean = _moment(self).shape.as_list()
        own = value.shape.as_list()
        shape = [1] * (len(mean) - len(own)) + own
        return len(shape) == len(mean) and all(mine == 1 for mine, entry in zip(shape, mean) if entry == 1)


def find(program: Program) -> tuple[list[Call], int]:
    """Returns the calls whose statistics can be each rank's own, and how many more there are for which they cannot.

    The calls of one layer are treated alike.
    """
    calls = [call for node in program.nodes for call in [_call_of(program, node)] if call is not None]
    candidates = _candidates(program, calls)
    layers: dict[Value | None, list[Call]] = {}
    understood = {call for call in calls if _understand(program, call, candidates[call])}
    for call in calls:
        layers.setdefault(call.layer, []).append(call)
    result = [call for call in calls if call.layer is not None and understood.issuperset(layers[call.layer])]
    return result, len(calls) - len(result)


def _moment(call: Call) -> Value:
    return call.mean.outputs[0]


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


def _readers(program: Program, value: Value, of_type: str) -> list[Node]:
    return [node for node in program.readers(value) if node is not None and node.type == of_type]


def _candidates(program: Program, calls: Sequence[Call]) -> dict[Call, list[Node]]:
    """Returns the operations of each call's scopes, and the sums of several gradients, which the tape names otherwise.

    In an order in which they can run.
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
    """Says in `call` what its operations are. Returns: whether all that have to do with own values are understood."""
    call.kinds[_moment(call)] = call.kinds[call.variance.outputs[0]] = OWN
    call.parts.update({call.mean: MEAN, call.variance: VARIANCE})
    updates: set[Node] = set()
    for node in candidates:
        if node in call.parts or node in updates or node.type in SHAPE_OPS:
            continue
        update = _moving_average(program, call, node)
        if update:
            call.parts[node] = UPDATE
            updates.update(update)
            continue
        kinds = [call.kind(value) for value in node.inputs]
        if not {OWN, SUMS}.intersection(kinds):
            is_sum = node.type == "Sum" and kinds[0] == ROWS and node.key.startswith(call.backward)
            if is_sum and not _understand_sum(program, call, node):
                return False
            continue
        if node.type == "AddN" and not _is_read_in(program, node, call.backward):
            continue  # a gradient of gamma, say: a sum that the rest of the step cares for
        if node.type == "Cast" and kinds == [SUMS] and node.outputs[0].dtype.size < node.inputs[0].dtype.size:
            continue  # the gradient of a gamma in float16, rounded when it has been summed
        part = _part(program, call, node, kinds)
        if part is None:
            return False
        call.parts[node] = part
        if part in (VALUE, TERM):
            call.kinds[node.outputs[0]] = OWN if part == VALUE else SUMS
    if call.layer is None:
        return False
    known = {*call.parts, *updates}
    return all(
        reader is not None and (reader in known or reader.type in SHAPE_OPS)
        for value, kind in call.kinds.items()
        if kind == OWN
        for reader in program.readers(value)
    )


def _is_read_in(program: Program, node: Node, scope: str) -> bool:
    return any(each is not None and each.key.startswith(scope) for each in program.readers(node.outputs[0]))


def _moving_average(program: Program, call: Call, node: Node) -> list[Node] | None:
    """Returns the operations that make a new moving statistic out of an own one, if `node` is the first of them.

    m * constant + (the old one, times another), assigned. Being linear, the mean over ranks may be taken first.
    """
    if node.type != "Mul" or [call.kinds.get(each) for each in node.inputs] != [OWN, None]:
        return None
    if not node.key.startswith(call.scope) or node.inputs[1].constant() is None or node.inputs[1].rank != 0:
        return None
    result = [node]
    for place, kind in enumerate(("AddV2", "Cast", "AssignVariableOp")):
        readers = program.readers(result[-1].outputs[0])
        if len(readers) != 1 or readers[0] is None:
            return None
        if readers[0].type != kind:
            if kind == "Cast":
                continue
            return None
        result.append(readers[0])
        if place == 0 and any(each in call.kinds for each in readers[0].inputs):
            return None
    handle = result[-1].inputs[0]
    if node.inputs[0] is _moment(call) or _is_same_entries(node.inputs[0], _moment(call)):
        call.layer = handle
    return result


def _keeps_entries(node: Node) -> bool:
    """Whether the result has the entries of the first operand, in their order."""
    return kind_of(node) is Kind.FORWARD or node.type in _RESHAPES


def _is_same_entries(value: Value, of: Value) -> bool:
    while value is not of:
        if not _keeps_entries(value.node):
            return False
        value = value.node.inputs[0]
    return True


def _understand_sum(program: Program, call: Call, node: Node) -> bool:
    """A sum over rows in the gradients. Where axes are known only when the step runs, the Reshape after it tells."""
    output = node.outputs[0]
    if output.shape.is_fully_defined():
        results = [output]
    else:
        readers = complete(program.readers(output))
        if not readers or any(each.type != "Reshape" for each in readers):
            return False
        results = [each.outputs[0] for each in readers]
        if all(call.is_like_rows(each) for each in results):
            return True  # a sum along no axis: rows, by themselves
    if not all(call.is_statistic(each) for each in results):
        return False
    call.kinds[output] = SUMS
    call.parts[node] = SUM
    return True


def _part(program: Program, call: Call, node: Node, kinds: Sequence[str | None]) -> str | None:
    if None in kinds or len(node.outputs) != 1:
        return None
    output = node.outputs[0]
    if not output.dtype.is_floating:
        return None
    if node.type in ("Tile", "BroadcastTo"):
        return SPREAD if _is_gradient_of_mean(program, call, node, kinds) else None
    if _keeps_entries(node):
        others_are_replicated = all(each == REPLICATED for each in kinds[1:])
        if kinds[0] not in (OWN, SUMS) or not call.is_statistic(output) or not others_are_replicated:
            return None
        return VALUE if kinds[0] == OWN else TERM
    if kind_of(node) is not Kind.ENTRYWISE:
        return None
    if ROWS in kinds:
        others = [value for value, kind in zip(node.inputs, kinds) if kind != ROWS]
        if SUMS in kinds or not call.is_like_rows(output):
            return None
        return ROW if all(map(call.is_repeated_along_rows, others)) else None
    if not call.is_statistic(output):
        return None
    if SUMS not in kinds:
        return VALUE
    return TERM if _is_linear(node, [place for place, kind in enumerate(kinds) if kind == SUMS]) else None


def _is_linear(node: Node, places: Sequence[int]) -> bool:
    """Whether an operation is linear in the operands at these places, the others being given."""
    spec = spec_of(node.type)
    assert spec is not None
    if spec.linear.together:
        return len(places) == len(node.inputs)
    is_rounded = any(each.dtype != node.outputs[0].dtype for each in node.inputs)
    return len(places) == 1 and places[0] in spec.linear.at and not is_rounded


def _is_gradient_of_mean(program: Program, call: Call, node: Node, kinds: Sequence[str | None]) -> bool:
    """Whether a sum is repeated for every row, and then divided by the number of rows of the global batch."""
    if kinds != [SUMS, REPLICATED] or not call.is_like_rows(node.outputs[0]) or not node.key.startswith(call.backward):
        return False
    if not call.is_repeated_along_rows(node.inputs[0]):
        return False
    readers = program.readers(node.outputs[0])
    if len(readers) != 1 or readers[0] is None or readers[0].type != "RealDiv":
        return False
    divided, count = readers[0].inputs
    return divided is node.outputs[0] and _is_count(call, count)


def _is_count(call: Call, value: Value) -> bool:
    """Whether a scalar is the number of x's entries for each of the mean's, as the gradient of Mean makes it."""
    constant = value.constant()
    if constant is not None:
        entries = call.x.shape.num_elements()
        return entries is not None and constant == entries / max(_moment(call).shape.num_elements(), 1)
    for kind in ("Cast", "Prod", "GatherV2"):  # of the extents along the axes
        if value.node.type != kind:
            return False
        value = value.node.inputs[0]
    return value.node.type == "Shape" and value.dtype in (tf.int32, tf.int64) and _is_rows_of(call, value.node)


def _is_rows_of(call: Call, shape: Node) -> bool:
    return shape.inputs[0] is call.x or shape.inputs[0] is call.variance.inputs[0]
