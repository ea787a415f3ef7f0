"""Patches Keras's optimizers for DistributedOptimizer, where Keras has no hook.

The first DistributedOptimizer installs the patches, of keras/src/optimizers/base_optimizer.py and
loss_scale_optimizer.py (3.15.1).
"""

from __future__ import annotations

import functools
from typing import Any

from keras_ddl.compat import keras as keras_compat
from keras_ddl.compat.context import Setting
from keras_ddl.compat.optimizers import batches_counted
from keras_ddl.gradients import own_reductions

# True within the update of an optimizer that reduces; `iterations` then counts updates.
counting_updates = Setting("counting_updates", False)


@functools.cache
def install() -> None:
    """Patches the two classes, once per process."""
    keras_compat.BaseOptimizer.iterations = _iterations(keras_compat.BaseOptimizer.iterations)
    keras_compat.LossScaleOptimizer.check_finite = _check_finite(keras_compat.LossScaleOptimizer.check_finite)


def _iterations(original: property) -> property:
    """Makes `iterations` of an optimizer that reduces count batches, also with gradient accumulation."""

    def counted(self: Any) -> Any:
        """The number of steps taken, as tf.Variable or tensor."""
        if own_reductions.reduction_of(self) is not None and not counting_updates.get():
            return batches_counted(self)
        assert original.fget is not None
        return original.fget(self)

    return property(counted, original.fset, original.fdel)


def _check_finite(original: Any) -> Any:
    """Makes all ranks skip a step if gradients overflow on one rank before they are reduced."""

    @functools.wraps(original)
    def check_finite(self: Any, grads: Any) -> Any:
        finite = original(self, grads)
        reduction = own_reductions.reduction_of(self.inner_optimizer)
        return finite if reduction is None else reduction.all_agree(finite)

    return check_finite
