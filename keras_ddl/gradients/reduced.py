"""Which gradients are reduced already, so that an optimizer reduces each of them once.

In a graph the operations show it: a gradient that was computed from a reduced one (clipped, scaled) is reduced. In
eager mode only the very tensors are known.
"""

from __future__ import annotations

import weakref
from typing import Any

from keras_ddl.compat.tensorflow import FuncGraph, is_eager, tf
from keras_ddl.gradients.origin import comes_from

# For each graph: {name of a reduced tensor: the names of the tensors of the gradient before}. Names, because a tensor
# would keep its graph for ever.
_noted: weakref.WeakKeyDictionary[Any, dict[str, list[str]]] = weakref.WeakKeyDictionary()
_noted_eagerly: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def note(before: Any, after: Any) -> None:
    """Records that `after`, a tensor or tf.IndexedSlices, is the gradient `before` reduced over ranks."""
    values = _values(after)
    if is_eager(values):
        _noted_eagerly[id(values)] = values
    else:
        names = [tensor.name for tensor in tf.nest.flatten(before, expand_composites=True)]
        _noted.setdefault(values.graph, {})[values.name] = names


def before(gradient: Any) -> Any:
    """Returns the gradient that `gradient` is the reduction of, where that is known; else `gradient`."""
    values = _values(gradient)
    if not isinstance(values, tf.Tensor) or is_eager(values):
        return gradient
    names = _noted.get(values.graph, {}).get(values.name)
    if names is None:
        return gradient
    tensors = [values.graph.get_tensor_by_name(name) for name in names]
    return tf.IndexedSlices(*tensors) if isinstance(gradient, tf.IndexedSlices) else tensors[0]


def is_noted(gradient: Any) -> bool:
    """Whether `gradient` itself was noted, whatever it was computed from."""
    values = _values(gradient)
    if not isinstance(values, tf.Tensor):
        return False
    if is_eager(values):
        return _noted_eagerly.get(id(values)) is values
    return values.name in _noted.get(values.graph, {})


def is_reduced(gradient: Any, clean: set[str] | None = None) -> bool:
    """Whether `gradient` was noted or, in a graph, computed from one that was.

    Args:
        clean: names of operations of the graph that were not computed from a reduced gradient; it grows, for the next
            gradient of the same graph.
    """
    values = _values(gradient)
    if not isinstance(values, tf.Tensor) or is_eager(values):
        return is_noted(gradient)
    noted = {name.partition(":")[0] for name in _noted.get(values.graph, {})}
    if noted and comes_from(values, noted, clean):
        return True
    # A branch of a tf.cond: what it was computed from may lie in the graph around it.
    captures = values.graph.captures if isinstance(values.graph, FuncGraph) else ()
    return any(is_reduced(outer) for outer, inner in captures if comes_from(values, {inner.op.name}))


def _values(gradient: Any) -> Any:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
