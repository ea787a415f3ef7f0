"""Trainable variables start from rank 0's values: their initializer ends in a broadcast.

The broadcast stands behind the initializers, not in the initial values. So a graph that is exported before its
initializer is made has none of DDL's operations in it, variables that were made before `import ddl` start alike too,
and a graph whose initializer is run by one rank only (evaluation, inference) says so with `disable_broadcast`.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from keras_ddl import ops
from keras_ddl.compat.tensorflow import after_each_variable, tf, with_initializers
from keras_ddl.ddl import job
from keras_ddl.ops import variables as variable_lists

_REQUEST_BYTES = 256 << 20


class _State:
    enabled = True
    # By graph: the names of the variables that were made while it was off.
    left_out: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()


def install() -> None:
    """Changes the initializers of tf.compat.v1. Once per process."""
    after_each_variable(_note)
    with_initializers(_then_broadcast)


def enable_broadcast() -> None:
    """From now on variables that are made start from rank 0's values, as from the beginning."""
    _State.enabled = True


def disable_broadcast() -> None:
    """From now on variables that are made start from each rank's own values, until `enable_broadcast`.

    For graphs that not every rank initialises, such as that of an evaluation on rank 0.
    """
    _State.enabled = False


def broadcast_op(variables: Sequence[Any], name: str) -> tf.Operation:
    """Returns an operation that assigns rank 0's values to `variables` on all ranks. COLLECTIVE when it runs."""
    assigned = []
    for number, group in enumerate(variable_lists.groups(variables, _REQUEST_BYTES)):
        values = ops.broadcast_n([variable.read_value() for variable in group], name=f"{name}/{number}")
        assigned += [variable.assign(value).op for variable, value in zip(group, values)]
    return tf.group(*assigned)


def _note(variable: Any) -> None:
    if not _State.enabled and not tf.executing_eagerly():
        _State.left_out.setdefault(variable.graph, set()).add(variable.name)


def _then_broadcast(initializer: Any, variables: Sequence[Any]) -> Any:
    if tf.executing_eagerly() or not job.is_training_together():
        return initializer
    left_out = _State.left_out.get(tf.compat.v1.get_default_graph(), set())
    chosen = [variable for variable in variables if variable.trainable and variable.name not in left_out]
    if not chosen:
        return initializer
    with tf.control_dependencies([initializer]):
        return broadcast_op(chosen, "ddl/initial_values")
