"""Tracks which gradients are already reduced, so that an optimizer reduces each gradient once.

In a graph the operations show it: a gradient that was computed from a reduced one (clipped, scaled) is reduced. In
eager mode only the tensors themselves are known, and the variables whose reduced gradients the program has not applied
yet: another gradient of such a variable may be computed from the reduced one.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Any

from keras_ddl.compat.tensorflow import FuncGraph, is_eager, tf

# The attribute that marks an eager tensor, or a variable (see `note_variable`). On a graph it is
# {name of a reduced tensor: names of the tensors of the gradient before}.
_MARK = "_keras_ddl_reduced"


def note(before: Any, after: Any) -> None:
    """Records that `after`, a tensor or tf.IndexedSlices, is the gradient `before` reduced over ranks."""
    values = _values(after)
    if is_eager(values):
        setattr(values, _MARK, True)
    else:
        names = [tensor.name for tensor in tf.nest.flatten(before, expand_composites=True)]
        setattr(values.graph, _MARK, {**_names_in(values.graph), values.name: names})


def note_variable(variable: Any) -> None:
    """Records, in eager mode, that the program has a reduced gradient of `variable`, and may change it."""
    if tf.executing_eagerly():
        setattr(variable, _MARK, True)


def take_noted(gradient: Any, variable: Any) -> bool:
    """Returns whether `gradient` was noted. If so, it is about to be applied, so `note_variable` is undone."""
    if not is_noted(gradient):
        return False
    if hasattr(variable, _MARK):
        delattr(variable, _MARK)
    return True


def before(gradient: Any) -> Any:
    """Returns the gradient whose reduction is `gradient`, if it is known; else `gradient`."""
    values = _values(gradient)
    if not _is_symbolic(values):
        return gradient
    names = _names_in(values.graph).get(values.name)
    if names is None:
        return gradient
    tensors = [values.graph.get_tensor_by_name(name) for name in names]
    return tf.IndexedSlices(*tensors) if isinstance(gradient, tf.IndexedSlices) else tensors[0]


def is_noted(gradient: Any) -> bool:
    """Whether `gradient` itself was noted, regardless of its operands."""
    values = _values(gradient)
    if not isinstance(values, tf.Tensor):
        return False
    return hasattr(values, _MARK) if is_eager(values) else values.name in _names_in(values.graph)


def are_reduced(gradients: Iterable[Any]) -> list[bool]:
    """Returns whether the gradients were noted or, in a graph, computed from a gradient that was.

    Cost: per graph, one look at its captures and one walk over the operations computed from reduced gradients.
    """
    known: dict[Any, set[str]] = {}
    return [_is_reduced(gradient, known) for gradient in gradients]


def may_be_reduced(gradients: Sequence[Any], variables: Sequence[Any]) -> list[bool]:
    """Like `are_reduced`; in eager mode also true for a gradient computed from a reduced gradient of its variable."""
    return [
        is_reduced or (not _is_symbolic(_values(gradient)) and hasattr(variable, _MARK))
        for gradient, variable, is_reduced in zip(gradients, variables, are_reduced(gradients))
    ]


def _is_reduced(gradient: Any, known: dict[Any, set[str]]) -> bool:
    """Whether one gradient is reduced. `known`: names of a graph's operations with reduced results; names are added."""
    values = _values(gradient)
    if not _is_symbolic(values):
        return is_noted(gradient)
    graph = values.graph
    if graph not in known:
        sources = [graph.get_tensor_by_name(name).op for name in _names_in(graph)]
        # In a branch of a tf.cond, the operands may lie in the surrounding graph.
        captures = graph.captures if isinstance(graph, FuncGraph) else ()
        sources += [inner.op for outer, inner in captures if _is_reduced(outer, known)]
        known[graph] = computed_from(sources)
    return values.op.name in known[graph]


def _names_in(graph: tf.Graph) -> dict[str, list[str]]:
    return getattr(graph, _MARK, {})


def _is_symbolic(values: Any) -> bool:
    return isinstance(values, tf.Tensor) and not is_eager(values)


def _values(gradient: Any) -> Any:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def comes_from(tensor: Any, sources: Container[str]) -> bool:
    """Whether `tensor` is the result of, or was computed from, one of the operations named `sources`."""
    seen: set[str] = set()
    pending = [tensor.op]
    while pending:
        operation = pending.pop()
        if operation.name in sources:
            return True
        if operation.name not in seen:
            seen.add(operation.name)
            pending.extend(each.op for each in operation.inputs)
    return False


def computed_from(sources: Iterable[tf.Operation]) -> set[str]:
    """Returns the names of `sources` and of all operations that directly or indirectly use their results."""
    pending = list(sources)
    names = {operation.name for operation in pending}
    while pending:
        for user in (user for result in pending.pop().outputs for user in result.consumers()):
            if user.name not in names:
                names.add(user.name)
                pending.append(user)
    return names
