"""The patch by which `metric.result()` is that of all ranks in loops of the program's own, as in tf.distribute.

Inside `strategy.run` a metric counts this rank's rows, and its result is the rank's own. Outside, the states of all
ranks are reduced first: COLLECTIVE. Keras's own loops ask for results of all metrics at once, and are left alone.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

from keras_ddl import ops
from keras_ddl.compat import keras as keras_compat
from keras_ddl.compat.tensorflow import tf
from keras_ddl.strategy import metric_state, step
from keras_ddl.strategy.thread_value import ThreadValue

_local = ThreadValue(False)
_MARK = "_ddl_of_all_ranks"


def init(original: Callable[..., Any]) -> Callable[..., Any]:
    """A metric that is made under a Strategy: from now on its class gives results of all ranks."""

    def __init__(self, *args, **kwargs):
        original(self, *args, **kwargs)
        strategy = keras_compat.scope_strategy()
        if strategy is None or strategy.size == 1:
            return
        object.__setattr__(self, "_ddl_strategy", strategy)
        for owner in type(self).__mro__:
            result = vars(owner).get("result")
            if result is not None and not hasattr(result, _MARK):
                owner.result = _of_all_ranks(result)

    return __init__


def of_this_rank() -> contextlib.AbstractContextManager[None]:
    """Returns a context in which results are made from the states that the metrics hold on this rank."""
    return _local.set_to(True)


def _of_all_ranks(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def result(self):
        strategy = getattr(self, "_ddl_strategy", None)
        if strategy is None or step.innermost() is not None or _local.get():
            return original(self)
        with of_this_rank(), ops.translate_errors():
            states = [_everyone(self, variable, strategy) for variable in self.variables]
            return self.stateless_result(states)

    setattr(result, _MARK, True)
    return result


def _everyone(metric: Any, variable: Any, strategy: Any) -> tf.Tensor:
    name = f"{keras_compat.plain_name(metric.name)}/{keras_compat.plain_name(variable.name)}"
    value = tf.convert_to_tensor(variable.value)
    reduction = metric_state.reduction_of(metric, variable)
    if reduction == "equal":
        return ops.broadcast(value, root=0, name=name)
    return ops.all_reduce(value, op=reduction, name=name)
