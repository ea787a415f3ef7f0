"""Operations entry by entry that, of parts of a sum, give a part of a sum."""

from __future__ import annotations

from typing import Any

import numpy as np

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.states import PARTIAL, Whole

# f(a + b) = f(a) + f(b), also when rounded as one sum is: a part of a sum stays one.
LINEAR = {"Neg"}


def of_parts(b: Any, node: Any) -> Any:
    """Makes an operation entry by entry of parts of sums where that gives a part; asks for no sum. Else None."""
    states = [b.state(each) for each in node.inputs]
    if len(states) == 1 and node.type != "AddN":
        keeps = states[0] == PARTIAL and (node.type in LINEAR or _keeps_sums(node))
        return [(b.make(node, [b.held(node.inputs[0])])[0], PARTIAL)] if keeps else None
    if node.type == "AddN" and all(each == PARTIAL for each in states):
        return [(b.make(node, [b.held(each) for each in node.inputs])[0], PARTIAL)]
    return _of_several(b, node, states) if len(states) == 2 or node.type == "AddN" else None


def _of_several(b: Any, node: Any, states: list[Any]) -> Any:
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


def _keeps_sums(node: Any) -> bool:
    # Only towards a type that holds all of the parts: rounding before the sum is not rounding the sum.
    source, target = node.inputs[0].dtype, node.outputs[0].dtype
    return node.type == "Cast" and source.is_floating and target.is_floating and target.size > source.size
