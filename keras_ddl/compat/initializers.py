"""Changes the initializers of tf.compat.v1's variables, and lists of initializers, for scripts of DDL."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from keras_ddl.compat import replacing
from keras_ddl.compat.context import Setting
from keras_ddl.compat.tensorflow import ref_variable, resource_variable_ops, tf, variable_v1, variables


def after_each_variable(call: Callable[[Any], None]) -> None:
    """Calls `call`, from now on, with every new tf.Variable and tf.compat.v1.Variable in any graph."""

    def create(original: Any, next_creator: Any = None, **kwargs: Any) -> Any:
        variable = original(next_creator, **kwargs)
        call(variable)
        return variable

    creators = [(variable_v1, "default_variable_creator"), (variables, "default_variable_creator_v2")]
    replacing.replace([(*each, create) for each in creators])


_plain_initializers = Setting("plain_initializers", False)


def with_initializer(change: Callable[[tf.Operation, Any], tf.Operation]) -> None:
    """From now on `variable.initializer` of a graph's variable is `change(op, variable)`, where op is the original.

    Lists of variables (with_initializers) and saved graphs still use the variable's original initializer.
    """

    def initializer(original: Any, variable: Any) -> Any:
        own = original(variable)
        return own if own is None or _plain_initializers.get() else change(own, variable)

    kinds = (resource_variable_ops.BaseResourceVariable, ref_variable.RefVariable)
    patches = {"initializer": initializer, "to_proto": _plainly}
    replacing.replace([(kind, name, patch) for kind in kinds for name, patch in patches.items()])


def _plainly(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls `original`, in which `variable.initializer` is unchanged."""
    with _plain_initializers(True):
        return original(*args, **kwargs)


def with_initializers(change: Callable[[Any, Sequence[Any]], Any]) -> None:
    """From now on `change(op, variables)` initializes `variables`, where op is the original.

    All of tf.compat.v1's initializers call this, including global_variables_initializer and that of a Scaffold.
    """

    def initialize(original: Any, var_list: Sequence[Any], name: str = "init") -> Any:
        return change(_plainly(original, var_list, name), list(var_list or ()))

    homes = [(variables, "variables_initializer"), (tf.compat.v1, "variables_initializer")]
    replacing.replace([(*each, initialize) for each in [*homes, (tf.compat.v1.initializers, "variables")]])
