"""Changes the initializers of tf.compat.v1's variables, and lists of initializers, for scripts of DDL."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from keras_ddl.compat.tensorflow import ref_variable, resource_variable_ops, tf, variable_v1, variables


def after_each_variable(call: Callable[[Any], None]) -> None:
    """Calls `call`, from now on, with every new tf.Variable and tf.compat.v1.Variable in any graph."""
    for module, name in ((variable_v1, "default_variable_creator"), (variables, "default_variable_creator_v2")):
        _set_creator(module, name, getattr(module, name), call)


def _set_creator(module: ModuleType, name: str, original: Callable[..., Any], call: Callable[[Any], None]) -> None:
    @functools.wraps(original)
    def create(next_creator: Any = None, **kwargs: Any) -> Any:
        variable = original(next_creator, **kwargs)
        call(variable)
        return variable

    setattr(module, name, create)


_plain_initializers = threading.local()


def with_initializer(change: Callable[[tf.Operation, Any], tf.Operation]) -> None:
    """From now on `variable.initializer` of a graph's variable is `change(op, variable)`, where op is the original.

    Lists of variables (with_initializers) and saved graphs still use the variable's original initializer.
    """
    for kind in (resource_variable_ops.BaseResourceVariable, ref_variable.RefVariable):
        kind.initializer = property(_changed_initializer(kind.initializer.fget, change))
        kind.to_proto = _plainly(kind.to_proto)


def _changed_initializer(original: Callable[[Any], Any], change: Callable[..., Any]) -> Callable[[Any], Any]:
    @functools.wraps(original)
    def initializer(self: Any) -> Any:
        own = original(self)
        plain = own is None or getattr(_plain_initializers, "on", False)
        return own if plain else change(own, self)

    return initializer


def _plainly(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `original`, wrapped so that `variable.initializer` is unchanged inside it."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        before = getattr(_plain_initializers, "on", False)
        _plain_initializers.on = True
        try:
            return original(*args, **kwargs)
        finally:
            _plain_initializers.on = before

    return call


def with_initializers(change: Callable[[Any, Sequence[Any]], Any]) -> None:
    """From now on `change(op, variables)` initializes `variables`, where op is the original.

    All of tf.compat.v1's initializers call this, including global_variables_initializer and that of a Scaffold.
    """
    original = _plainly(variables.variables_initializer)

    @functools.wraps(original)
    def variables_initializer(var_list: Sequence[Any], name: str = "init") -> Any:
        return change(original(var_list, name), list(var_list or ()))

    variables.variables_initializer = variables_initializer
    tf.compat.v1.variables_initializer = variables_initializer
    tf.compat.v1.initializers.variables = variables_initializer
