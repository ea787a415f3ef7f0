"""What Keras's optimizers do differently around a DistributedOptimizer, for which they have no hook.

Installed when the first one is made. Patched: keras/src/optimizers/base_optimizer.py, loss_scale_optimizer.py (3.15.1).
"""

from __future__ import annotations

import functools
from contextvars import ContextVar
from typing import Any

from keras_ddl.compat import keras as keras_compat
from keras_ddl.compat.optimizers import batches_counted
from keras_ddl.gradients import own_reductions

# While an optimizer that reduces by itself updates: what Keras computes there counts updates.
counting_updates: ContextVar[bool] = ContextVar("keras_ddl_counting_updates", default=False)


@functools.cache
def install() -> None:
    """Changes the two classes, once per process."""
    keras_compat.BaseOptimizer.iterations = _iterations(keras_compat.BaseOptimizer.iterations)
    keras_compat.LossScaleOptimizer.check_finite = _check_finite(keras_compat.LossScaleOptimizer.check_finite)


def _iterations(original: property) -> property:
    """An optimizer that reduces by itself shows batches, also where it accumulates gradients."""

    def counted(self: Any) -> Any:
        """How many steps have been taken, as tf.Variable or tensor."""
        if own_reductions.reduction_of(self) is not None and not counting_updates.get():
            return batches_counted(self)
        assert original.fget is not None
        return original.fget(self)

    return property(counted, original.fset, original.fdel)


def _check_finite(original: Any) -> Any:
    """Gradients that are yet to be reduced may overflow on one rank: then all skip the step."""

    @functools.wraps(original)
    def check_finite(self: Any, grads: Any) -> Any:
        finite = original(self, grads)
        reduction = own_reductions.reduction_of(self.inner_optimizer)
        return finite if reduction is None else reduction.all_agree(finite)

    return check_finite
