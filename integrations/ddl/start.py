"""Makes trainable variables start from rank 0's values.

In a graph, their initializer ends in a broadcast, which follows the initializers and is not part of the initial values.
So a graph that is exported before its initializer is made has no operations of DDL, and variables made before `import
ddl` also start equal. For a graph whose initializer only one rank runs (evaluation, inference), the script calls
`disable_broadcast`. In eager mode a variable has its value at once, so ranks compare variables when an optimizer first
trains them, which all ranks do together. A model that one rank alone makes stays its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from keras_ddl import communicator, ops
from keras_ddl.communicator.comparison import is_equal
from keras_ddl.communicator.reporting import stack_position
from keras_ddl.compat.initializers import after_each_variable, with_initializer, with_initializers
from keras_ddl.compat.tensorflow import tf
from keras_ddl.ddl import job
from keras_ddl.gradients.reduced import comes_from
from keras_ddl.ops import variables as variable_lists
from keras_ddl.state.checksum import checksum

_ASSIGNMENTS = ("Assign", "AssignVariableOp")


class _State:
    enabled = True
    # Graph -> names of the variables that were made while the broadcast was off.
    left_out: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()
    # Graph -> the operations that initialise one variable, by the name of its own initializer.
    initializers: weakref.WeakKeyDictionary[Any, dict[str, str]] = weakref.WeakKeyDictionary()
    # Eager variables, by id, that need no broadcast: they already have rank 0's values, or must not get them.
    settled: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def install() -> None:
    """Changes the initializers of tf.compat.v1. Once per process."""
    after_each_variable(_note)
    with_initializers(_then_broadcast)
    with_initializer(_broadcast_first)


def enable_broadcast() -> None:
    """Makes variables created from now on start from rank 0's values, which is the default."""
    _State.enabled = True


def disable_broadcast() -> None:
    """Makes variables created from now on start from each rank's own values, until `enable_broadcast`.

    For graphs that not every rank initialises, such as the graph of an evaluation on rank 0.
    """
    _State.enabled = False


def settle(variables: Iterable[Any]) -> None:
    """Assigns rank 0's values to newly trained `variables` that differ between ranks.

    For eager mode and for a tf.function that is being traced; elsewhere initializers do this. COLLECTIVE if some
    variables are new, as they then are on all ranks.
    """
    with tf.init_scope():
        if not tf.executing_eagerly():
            return
        new = [each for each in variable_lists.unwrap(list(variables)) if _State.settled.get(id(each)) is not each]
        new = [each for each in new if bool(each.is_initialized())]  # not one that the tf.function itself is making
        if not new:
            return
        _State.settled.update((id(each), each) for each in new)
        if is_equal(repr([checksum(each.numpy()) for each in new]).encode(), "ddl/first_values"):
            return
        ops.broadcast_variables(new)
    if tf.executing_eagerly() and communicator.rank() == 0:  # not in a tf.function, which computes its gradients later
        stack_position.warn(
            "ddl: variables must be equal on all ranks before gradients are computed. Received: values that differ "
            f"between ranks when {variable_lists.describe(new)} were first trained. All ranks now use the values of "
            "rank 0, but the gradients of this first step come from the old values of each rank. Call "
            "keras_ddl.broadcast_variables(model.variables) before training, or pass DDLGlobalVariablesCallback() to "
            "fit."
        )


def _note(variable: Any) -> None:
    if not _State.enabled:
        if tf.executing_eagerly():
            _State.settled[id(variable)] = variable
        else:
            _State.left_out.setdefault(variable.graph, set()).add(variable.name)


def _then_broadcast(initializer: Any, variables: Sequence[Any]) -> Any:
    if tf.executing_eagerly() or not job.is_training_together():
        return initializer
    sources = _trained(tf.compat.v1.get_default_graph())
    chosen = [variable for variable in variables if _starts_as_on_rank_0(variable, sources)]
    if not chosen:
        return initializer
    with tf.control_dependencies([initializer]):
        return ops.broadcast_variables(chosen)


def _broadcast_first(initializer: tf.Operation, variable: Any) -> tf.Operation:
    """Returns the operation that assigns rank 0's initial value, for `session.run(variable.initializer)`."""
    if tf.executing_eagerly() or initializer.type not in _ASSIGNMENTS or not job.is_training_together():
        return initializer
    graph = initializer.graph
    made = _State.initializers.setdefault(graph, {})
    if initializer.name not in made:
        if not _starts_as_on_rank_0(variable, _trained(graph)):
            return initializer
        with graph.as_default(), tf.control_dependencies(None):
            # As in the variable's own initializer, the value is the second input, which `variable.load` replaces.
            value = ops.broadcast(initializer.inputs[1], name=f"ddl/initial_value/{variable.name}")
            made[initializer.name] = variable.assign(value, read_value=False).name
    return graph.get_operation_by_name(made[initializer.name])


def _trained(graph: Any) -> set[str]:
    """Returns the names of the operations of the variables that start from rank 0's values."""
    left_out = _State.left_out.get(graph, set())
    with graph.as_default():
        trained = [each for each in tf.compat.v1.trainable_variables() if each.name not in left_out]
    names = {each.op.name for each in trained}
    return names | {each.initial_value.op.name for each in trained if each.initial_value is not None}


def _starts_as_on_rank_0(variable: Any, sources: set[str]) -> bool:
    """Whether a variable is trained, or starts from the value of a trained one (a moving average of weights)."""
    graph = variable.graph
    if variable.dtype.base_dtype == tf.string or variable.name in _State.left_out.get(graph, set()):
        return False
    return bool(variable.trainable) or (
        variable.initial_value is not None and comes_from(variable.initial_value, sources)
    )
