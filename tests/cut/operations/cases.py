"""Small programs of x [rows, 3] in float64, at least one for each type of operation with a rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.operations import registry

CASES: dict[str, list[Callable[[Any], Any]]] = {}


# Rule files for control flow (test_control_flow.py) and host functions (test_host.py), and types of operations on
# sharded variables (test_mesh.py).
TESTED_ELSEWHERE = ("branches", "loops", "host", "ResourceScatterUpdate", "VarIsInitializedOp", "VariableShape")


def case(*types: str) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    """Names the types of operations that a program must contain."""

    def register(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        for each in types:
            CASES.setdefault(each, []).append(function)
        return function

    return register


def types_to_try() -> list[str]:
    """Returns the types of operations whose rules these programs test."""
    found = []
    for each in registry.types_with_rules():
        rules = [registry.rule_of(each), registry.rule_of(each, of_replicated=True)]
        modules = {rule.__module__.rsplit(".", 1)[-1] for rule in rules if rule is not None}
        if each not in TESTED_ELSEWHERE and not modules <= set(TESTED_ELSEWHERE):
            found.append(each)
    return found


def rows_of(x: Any, *shape: int) -> Any:
    """Returns a tensor [rows, *shape] computed from x."""
    count = int(np.prod(shape))
    table = np.sin(np.arange(3.0 * count)).reshape(3, count)
    return tf.reshape(tf.tanh(tf.matmul(x, table)), [-1, *shape])


def with_gradients(function: Callable[..., Any], *values: Any) -> list[Any]:
    """Returns the function's result and the gradients of the sum of its squares."""
    with tf.GradientTape() as tape:
        for each in values:
            tape.watch(each)
        found = function(*values)
        loss = tf.reduce_sum(tf.square(found)) / 7
    return [found, *tape.gradient(loss, values)]
