"""The list of small programs, one at least for each type of operation that has a rule: of x [rows, 3] in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from keras_ddl.compat.tensorflow import tf
from keras_ddl.cut.operations import registry

CASES: dict[str, list[Callable[[Any], Any]]] = {}


# Rules of control flow (test_control_flow.py) and of what hosts do (test_host.py), tested by these names.
# Files of rules, and types of operations; those on variables that are held sharded in test_mesh.py.
TESTED_ELSEWHERE = ("branches", "loops", "host", "ResourceScatterUpdate", "VarIsInitializedOp", "VariableShape")


def case(*types: str) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    """Says for which types a program stands; the test sees to it that it has them."""

    def register(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        for each in types:
            CASES.setdefault(each, []).append(function)
        return function

    return register


def types_to_try() -> list[str]:
    """Returns the types of operations whose rules are tried here."""
    found = []
    for each in registry.types_with_rules():
        rules = [registry.rule_of(each), registry.rule_of(each, of_replicated=True)]
        modules = {rule.__module__.rsplit(".", 1)[-1] for rule in rules if rule is not None}
        if each not in TESTED_ELSEWHERE and not modules <= set(TESTED_ELSEWHERE):
            found.append(each)
    return found


def rows_of(x: Any, *shape: int) -> Any:
    """Returns a tensor [rows, *shape] made of x."""
    count = int(np.prod(shape))
    table = np.sin(np.arange(3.0 * count)).reshape(3, count)
    return tf.reshape(tf.tanh(tf.matmul(x, table)), [-1, *shape])


def with_gradients(function: Callable[..., Any], *values: Any) -> list[Any]:
    """Returns what the function gives and the gradients of its squares' sum."""
    with tf.GradientTape() as tape:
        for each in values:
            tape.watch(each)
        found = function(*values)
        loss = tf.reduce_sum(tf.square(found)) / 7
    return [found, *tape.gradient(loss, values)]
