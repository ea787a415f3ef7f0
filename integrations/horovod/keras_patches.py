"""Patches Keras's optimizers for DistributedOptimizer, where Keras has no hook.

The first DistributedOptimizer installs the patches, of keras/src/optimizers/base_optimizer.py and
loss_scale_optimizer.py (3.15.1).
"""

from __future__ import annotations

import functools
from typing import Any

from keras_ddl.compat import keras as keras_compat
from keras_ddl.compat import replacing
from keras_ddl.compat.context import Setting
from keras_ddl.compat.optimizers import batches_counted
from keras_ddl.gradients import own_reductions

# True within the update of an optimizer that reduces; `iterations` then counts updates.
counting_updates = Setting("counting_updates", False)


@functools.cache
def install() -> None:
    """Patches the two classes, once per process."""
    table = [
        (keras_compat.BaseOptimizer, "iterations", _iterations),
        (keras_compat.LossScaleOptimizer, "check_finite", _check_finite),
    ]
    replacing.replace(table)


def _iterations(original: Any, optimizer: Any) -> Any:
    """Makes `iterations` of a reducing optimizer count batches, even with gradient accumulation."""
    if own_reductions.reduction_of(optimizer) is not None and not counting_updates.get():
        return batches_counted(optimizer)
    return original(optimizer)


def _check_finite(original: Any, optimizer: Any, grads: Any) -> Any:
    """Makes all ranks skip a step if gradients overflow on one rank before they are reduced."""
    finite = original(optimizer, grads)
    reduction = own_reductions.reduction_of(optimizer.inner_optimizer)
    return finite if reduction is None else reduction.all_agree(finite)
