"""Operations entry by entry, with broadcasting."""

from __future__ import annotations

from typing import Any

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut import linear
from keras_ddl.cut.dims import ONE
from keras_ddl.cut.entrywise import BINARY, UNARY
from keras_ddl.cut.registry import rule
from keras_ddl.cut.states import PARTIAL, ListOf, Partial, Rows


@rule(*UNARY)
def unary(b: Any, node: Any) -> Any:
    value = node.inputs[0]
    state = b.state(value)
    if isinstance(state, Partial):
        return linear.of_parts(b, node)
    return [(b.make(node, [b.held(value)])[0], state)]


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
        found = linear.of_parts(b, node)
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
