"""Gradients that an optimizer accumulates over several steps before it updates.

Within an epoch of fit each rank accumulates the gradients of its own rows, and nothing is summed over ranks until the
update. Before the program may read the accumulators (in a callback, at the end of an epoch, after fit) the ranks' parts
are summed, and every rank has the total, as one process does. In the next step rank 0 continues from the total and the
others from zero, so that the update sums the same values.

In a job that continues when a rank is lost, a part would be lost with its rank, and on a mesh the total is a sum over
the data ranks only. In these two cases each step sums its gradients over ranks, and every rank accumulates the total.

With Strategy(sharding="weights") the accumulator of a weight in shards is in shards, too: each step gives each rank its
chunk of the sum over ranks. No rank has room for a complete one.
"""

from __future__ import annotations

import weakref
from typing import Any

from keras_ddl import ops
from keras_ddl.compat import models
from keras_ddl.compat.tensorflow import tf
from keras_ddl.strategy.shards import sharded_slots

_in_parts: weakref.WeakSet[Any] = weakref.WeakSet()  # models whose ranks hold parts of sums; equal on all ranks


def partial_accumulators(model: Any) -> list[Any]:
    """Returns the accumulators in which each rank keeps its part of a sum: those that are not in shards."""
    return sharded_slots.whole(models.accumulators_of(model))


def begin_step(model: Any, rank: int) -> None:
    """Prepares a training step of fit that accumulates parts.

    The first one after `combine` clears the accumulators of all ranks but 0. Not collective.
    """
    if model in _in_parts or model.run_eagerly or not models.accumulates(model):
        return
    _in_parts.add(model)
    if rank != 0:
        for variable in partial_accumulators(model):
            variable.assign(tf.zeros_like(variable.value))


def combine(model: Any) -> None:
    """Sums the accumulators over ranks, so that every rank has the total.

    COLLECTIVE if steps have run since the last call and the optimizer is between two updates.
    """
    if model not in _in_parts:
        return
    _in_parts.discard(model)
    if models.is_accumulating(model):
        variables = partial_accumulators(model)
        totals = ops.all_reduce_n([each.value for each in variables], op="sum") if variables else []
        for variable, total in zip(variables, totals):
            variable.assign(total)
