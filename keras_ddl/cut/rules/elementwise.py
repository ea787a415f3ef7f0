"""Operations entry by entry, with broadcasting."""

from __future__ import annotations

from typing import Any

import numpy as np

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.dims import ONE
from keras_ddl.cut.entrywise import BINARY, UNARY
from keras_ddl.cut.registry import rule
from keras_ddl.cut.states import PARTIAL, ListOf, Partial, Rows, Whole

# f(a + b) = f(a) + f(b), also when rounded as one sum is: a part of a sum stays one.
LINEAR = {"Neg"}


@rule(*UNARY)
def unary(b: Any, node: Any) -> Any:
    value = node.inputs[0]
    state = b.state(value)
    if isinstance(state, Partial) and not (node.type in LINEAR and state.op == "sum" or _keeps_sums(node, state)):
        return None
    return [(b.make(node, [b.held(value)])[0], state)]


def _keeps_sums(node: Any, state: Partial) -> bool:
    # Only towards a type that holds all of the parts: rounding before the sum is not rounding the sum.
    source, target = node.inputs[0].dtype, node.outputs[0].dtype
    return (
        node.type == "Cast"
        and state.op == "sum"
        and source.is_floating
        and target.is_floating
        and target.size > source.size
    )


@rule("Bitcast")
def bitcast(b: Any, node: Any) -> Any:
    value = node.inputs[0]
    state = b.state(value)
    if not isinstance(state, Rows) or value.dtype.size != node.outputs[0].dtype.size:
        return None
    return [(b.make(node, [b.held(value)])[0], state)]


@rule("IdentityN", "Identity", "StopGradient", "PreventGradient", "Snapshot")
def identity(b: Any, node: Any) -> Any:
    if not node.after:
        return b.pass_on(node)
    # Kept apart where it stands for having waited for something.
    outputs = b.make(node, [b.held(each) for each in node.inputs])
    return [(tensor, b.state(value)) for tensor, value in zip(outputs, node.inputs)]


@rule(*UNARY, *BINARY, "AddN", "Identity", of_whole=True)
def of_whole(b: Any, node: Any) -> Any:
    """Of operands of which rows can be made by themselves (a random draw), rows of the result can."""
    pieces = b.make_whole(node)
    if any(b.has_recipe(each) for each in node.inputs) and not node.after and node.outputs[0].dtype != tf.variant:
        b.give_recipe(node.outputs[0], lambda rows: _rows_of(b, node, rows))
    return pieces


def _rows_of(b: Any, node: Any, rows: Rows) -> Any:
    rank = node.outputs[0].rank
    new = []
    for value in node.inputs:
        dims = b.dims(value)
        if dims is None or rank is None:
            return None
        axis = rows.axis - (rank - len(dims))
        if axis >= 0 and b.fits(value, rows.at(axis)):  # also a batch of 1, of which a rank may have none
            new.append(b.cut(value, rows.at(axis)))
        elif axis < 0 or dims[axis] == 1:
            new.append(b.whole(value))
        else:
            return None
    return b.make(node, new)[0]


@rule("AddN")
def add_n(b: Any, node: Any) -> Any:
    lists = next((b.state(each) for each in node.inputs if isinstance(b.state(each), ListOf)), None)
    if lists is not None:
        held = [b.list_of(each, lists) for each in node.inputs]
        return None if any(each is None for each in held) else [(b.make(node, held)[0], lists)]
    if all(b.state(each) == PARTIAL for each in node.inputs):
        return [(b.make(node, [b.held(each) for each in node.inputs])[0], PARTIAL)]
    return binary(b, node)


@rule(*BINARY)
def binary(b: Any, node: Any) -> Any:
    states = [b.state(each) for each in node.inputs]
    if (len(states) == 2 or node.type == "AddN") and any(isinstance(each, Partial) for each in states):
        found = _of_parts(b, node, states)
        if found is not None:
            return found
    return aligned(b, node, node.inputs)


@rule("Select")
def select(b: Any, node: Any) -> Any:
    """tf.where of TensorFlow 1, in losses of logits: a condition of the others' shape, for each of axis 0, or one."""
    condition, first, second = node.inputs
    dims = [b.dims(each) for each in node.inputs]
    rows = next((b.state(each) for each in (first, second, condition) if isinstance(b.state(each), Rows)), None)
    if rows is None or None in dims or not b.fits(first, rows) or not b.fits(second, rows):
        return None
    of_each = len(dims[0]) == len(dims[1])
    along = of_each or len(dims[0]) == 1 and rows.axis == 0  # else it is the same for all rows
    if along and not b.fits(condition, rows):
        return None
    b.wholes([each for each in node.inputs if isinstance(b.state(each), Partial)])
    chosen = b.cut(condition, rows) if along else b.whole(condition)
    return [(b.make(node, [chosen, b.cut(first, rows), b.cut(second, rows)])[0], rows)]


def _of_parts(b: Any, node: Any, states: list[Any]) -> Any:
    """Sums of parts, and parts times or divided by a number that is certainly finite and not 0.

    Of any other factor it is not known whether it is inf: 1 * inf + 0 * inf is not 1 * inf.
    """
    additive = node.type in ("Add", "AddV2", "Sub", "AddN")
    goes_on = b.in_loop or any(_is_accumulated(b, each) for each in node.inputs)
    if additive and goes_on and all(isinstance(each, Whole) or each == PARTIAL for each in states):
        # The sum goes on as parts, which are summed when the loop is over, or with what is accumulated.
        if any(b.dims(each) is None or b.dims(each) != b.dims(node.outputs[0]) for each in node.inputs):
            return None
        return [(b.make(node, [b.part(each) for each in node.inputs])[0], PARTIAL)]
    first, second = (*node.inputs, *node.inputs)[:2]
    if additive:
        linear = all(each == PARTIAL for each in states)
    elif node.type == "Mul":
        # Integers wrap around alike in any order.
        exact = node.outputs[0].dtype.is_integer
        linear = states == [PARTIAL, Whole()] and (exact or _is_finite(b, second))
        linear = linear or states == [Whole(), PARTIAL] and (exact or _is_finite(b, first))
    else:
        linear = states == [PARTIAL, Whole()] and node.type in ("RealDiv", "Div", "DivNoNan")
        linear = linear and node.outputs[0].dtype.is_floating and _is_finite(b, second)
    # A part that is repeated is summed before: there is less of it.
    parts = [value for value, state in zip(node.inputs, states) if state == PARTIAL]
    if not linear or any(b.dims(each) is None or b.dims(each) != b.dims(node.outputs[0]) for each in parts):
        return None
    return [(b.make(node, [b.held(each) for each in node.inputs])[0], PARTIAL)]


def _is_accumulated(b: Any, value: Any) -> bool:
    """Whether a value is read from a variable of which each rank holds a part."""
    return value.node.type == "ReadVariableOp" and b.state(value) == PARTIAL


def _is_finite(b: Any, value: Any) -> bool:
    """Whether all entries are certainly finite and not 0: constants, and the number of rows as a float."""
    constant = value.constant()
    if constant is not None:
        return bool(np.all(np.isfinite(constant)) and np.all(constant))
    while value.node.type in ("Cast", "Identity") and not value.dtype.is_integer:
        if value.dtype == tf.float16:  # 65536 rows are infinitely many
            return False
        value = value.node.inputs[0]
    number = b.extents.number(value)
    return number is not None and number.factor != 0 and all(each.kind == "rows" for each in number.unknowns)


def aligned(b: Any, node: Any, inputs: Any) -> Any:
    """Makes an operation whose operands broadcast against each other, cut along one axis of the output.

    Parts are summed first. Of operands that are cut along different axes those with fewer entries are gathered.
    """
    rank = node.outputs[0].rank
    dims = [b.dims(each) for each in inputs]
    if any(each is None for each in dims):
        return None
    if rank is None:
        rank = max(map(len, dims))
    chosen: Rows | None = None
    most = (-1, -1)
    for value, shape in zip(inputs, dims):
        state = b.state(value)
        if isinstance(state, Rows):
            at = state.at(state.axis + rank - len(shape))
            known = [each.number for each in shape]
            size = (len(shape), sum(1 for each in known if each != 1))
            if size > most:
                chosen, most = at, size
    if chosen is None:
        return None
    extent = b.extent(chosen)
    wanted = []
    for shape in dims:
        axis = chosen.axis - (rank - len(shape))
        here = ONE if axis < 0 else shape[axis]
        if here == extent and axis >= 0:
            wanted.append(chosen.at(axis))
        elif here == 1:
            wanted.append(None)
        else:
            return None  # it may be 1 or not: only whole tensors tell
    late = [value for value, rows in zip(inputs, wanted) if rows is None or isinstance(b.state(value), Partial)]
    b.wholes(late)
    new = [b.whole(value) if rows is None else b.cut(value, rows) for value, rows in zip(inputs, wanted)]
    return [(b.make(node, new)[0], chosen)]
