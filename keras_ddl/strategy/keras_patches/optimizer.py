"""Patches of Keras's optimizers: gradients are summed over ranks first, and everything else looks at the sum.

Keras clips, and LossScaleOptimizer looks for overflow, before it reduces. So ranks would clip other gradients than one
process would, and skip different steps. Patched: keras/src/optimizers/base_optimizer.py, loss_scale_optimizer.py,
backend/tensorflow/optimizer.py (3.15.1).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from keras_ddl import ops
from keras_ddl.communicator import stack_position
from keras_ddl.compat import keras as keras_compat
from keras_ddl.compat.keras import keras
from keras_ddl.compat.tensorflow import tf
from keras_ddl.errors import ConfigError
from keras_ddl.strategy import buckets, one_per_job, step
from keras_ddl.strategy.row_kinds import INDEPENDENT
from keras_ddl.strategy.sparse import Tables
from keras_ddl.strategy.thread_value import ThreadValue

_accumulating, _summed = ThreadValue(), ThreadValue(False)


def apply_gradients(original: Callable[..., Any]) -> Callable[..., Any]:
    """Sums over ranks what is not summed yet, after checking that optimizer and context belong together.

    With gradient accumulation the sum is left to the update: each rank accumulates its own part.
    """

    def _backend_apply_gradients(self, grads, trainable_variables):
        _check_context(self)
        strategy = keras_compat.replica_strategy()
        if strategy is None:
            return original(self, grads, trainable_variables)
        if accumulates(self):
            grads = _parts(grads)
        else:
            grads = _sum_over_ranks(self, grads, strategy)
        with _accumulating.set_to(self if accumulates(self) else None):
            return original(self, grads, trainable_variables)

    return _backend_apply_gradients


def clip_gradients(original: Callable[..., Any]) -> Callable[..., Any]:
    """Sums, then clips: with gradient accumulation Keras comes here once per update, with what was accumulated."""

    def _clip_gradients(self, grads):
        strategy = keras_compat.replica_strategy()
        if strategy is not None and _accumulating.get() is self:
            grads = _reduce(self, grads, strategy)
        return original(self, grads)

    return _clip_gradients


def all_reduce_sum_gradients(original: Callable[..., Any]) -> Callable[..., Any]:
    """Keras's own reduction, after clipping: nothing is left to do."""

    def _all_reduce_sum_gradients(self, grads_and_vars):
        if keras_compat.replica_strategy() is None:
            return original(self, grads_and_vars)
        return list(grads_and_vars)

    return _all_reduce_sum_gradients


# While an optimizer that reduces by itself updates: what Keras computes there counts updates.
counting_updates = ThreadValue(False)


def iterations(original: property) -> property:
    """An optimizer that reduces by itself (Horovod's) shows batches, also where it accumulates gradients."""

    def counted(self):
        """How many steps have been taken, as tf.Variable or tensor."""
        if keras_compat.own_reduction(self) is not None and not counting_updates.get():
            return self._iterations
        return original.fget(self)

    return property(counted, original.fset, original.fdel)


def loss_scale_apply(original: Callable[..., Any]) -> Callable[..., Any]:
    """Sums before LossScaleOptimizer looks for infinities: all ranks see the same sum and take the same branch."""

    def _tf_apply(self, grads, trainable_variables=None):
        strategy = keras_compat.replica_strategy()
        if strategy is None:
            return original(self, grads, trainable_variables)
        _check_context(self)
        if accumulates(self.inner_optimizer):
            return original(self, grads, trainable_variables)
        variables = trainable_variables or self._trainable_variables
        direct = [getattr(variable, "overwrite_with_gradient", False) for variable in variables]
        summed = _sum_over_ranks(self, [None if skip else g for g, skip in zip(grads, direct)], strategy)
        grads = [g if skip else total for g, total, skip in zip(grads, summed, direct)]
        with _summed.set_to(True):
            return original(self, grads, trainable_variables)

    return _tf_apply


def check_finite(original: Callable[..., Any]) -> Callable[..., Any]:
    """What each rank accumulates by itself may overflow on one of them: then all skip the step.

    So may what an optimizer without a Strategy is going to reduce.
    """

    def wrapper(self, grads):
        finite = original(self, grads)
        reduction = keras_compat.own_reduction(self.inner_optimizer)
        if reduction is not None:
            return reduction.all_agree(finite)
        if keras_compat.replica_strategy() is None or not accumulates(self.inner_optimizer):
            return finite
        name = f"{keras_compat.plain_name(self.name)}/finite"
        return tf.cast(ops.all_reduce(tf.cast(finite, tf.int32), op="min", name=name), tf.bool)

    return wrapper


def overwrite_variables(original: Callable[..., Any]) -> Callable[..., Any]:
    """Variables whose "gradient" is their new value (float8 scales) take the maximum over ranks, as Keras takes the
    maximum over the batches of gradient accumulation.
    """

    def _overwrite_variables_directly_with_gradients(self, grads, vars):
        strategy = keras_compat.replica_strategy()
        if strategy is not None and any(getattr(v, "overwrite_with_gradient", False) for v in vars):
            name = f"{keras_compat.plain_name(self.name)}/overwrite"
            grads = [
                ops.all_reduce(g, op="max", name=f"{name}_{i}") if getattr(v, "overwrite_with_gradient", False) else g
                for i, (g, v) in enumerate(zip(grads, vars))
            ]
        return original(self, grads, vars)

    return _overwrite_variables_directly_with_gradients


def accumulators(optimizer: Any) -> list[Any]:
    """The variables in which an optimizer, and those inside it, accumulate gradients between updates."""
    lists = [getattr(each, "_accumulated_gradients", None) or [] for each in keras_compat.optimizers_in(optimizer)]
    return [variable for variables in lists for variable in variables if variable is not None]


def accumulates(optimizer: Any) -> bool:
    """Whether an optimizer updates once for several steps."""
    return bool(getattr(optimizer, "gradient_accumulation_steps", None))


def _sum_over_ranks(optimizer: Any, grads: Sequence[Any], strategy: Any) -> list[Any]:
    """Sums gradients that are this rank's. In a step of Keras the tape has done it for those it has made."""
    if _summed.get():
        return list(grads)
    running = step.current()
    if running is None:
        return _reduce(optimizer, grads, strategy)
    local = [i for i, grad in enumerate(grads) if grad is not None and _is_local(running, grad)]
    result = list(grads)
    summed = _reduce(optimizer, _parts([grads[i] for i in local]), strategy)
    for i, grad in zip(local, summed):
        result[i] = grad
    return result


def _is_local(running: step.Step, grad: Any) -> bool:
    kinds = running.values.kinds
    if kinds is None:
        return running.gradients != "reduced"
    return kinds.of(_values(grad)) != INDEPENDENT


def _parts(grads: Sequence[Any]) -> list[Any]:
    """Returns this rank's part of each gradient; in loops of the program's own, the gradient itself."""
    running = step.current()
    if running is None:
        return list(grads)
    return [None if grad is None else _part(running, grad) for grad in grads]


def _part(running: step.Step, grad: Any) -> Any:
    kinds = running.values.kinds
    if kinds is None and running.gradients == "parts":
        return grad
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(running.values.part(grad.values), grad.indices, grad.dense_shape)
    return running.values.part(tf.convert_to_tensor(grad))


def _values(grad: Any) -> Any:
    return grad.values if isinstance(grad, tf.IndexedSlices) else tf.convert_to_tensor(grad)


def _reduce(optimizer: Any, grads: Sequence[Any], strategy: Any) -> list[Any]:
    present = [i for i, grad in enumerate(grads) if grad is not None]
    result = list(grads)
    summed = buckets.all_reduce_in_buckets(
        [_dense_or_slices(grads[i]) for i in present],
        op="sum",
        name=f"{keras_compat.plain_name(optimizer.name)}/gradients",
        bucket_size=strategy.extended.bucket_size,
        tables=tables_of(strategy, [optimizer]),
    )
    for i, grad in zip(present, summed):
        result[i] = grad
    return result


def tables_of(strategy: Any, optimizers: Sequence[Any]) -> Tables:
    """How gradients of tables are reduced in the step that runs."""
    running = step.innermost()
    kinds = None if running is None else running.values.kinds
    add_up = bool(optimizers) and all(is_linear(optimizer) for optimizer in optimizers)
    return Tables(strategy.extended.sparse_as_dense, add_up, kinds)


def is_linear(optimizer: Any) -> bool:
    """Whether updates depend on the sum of a table row's gradients only. A norm, too, is taken row by row."""
    clips = (optimizer.clipnorm, optimizer.global_clipnorm, optimizer.clipvalue)
    return type(optimizer) is keras.optimizers.SGD and all(limit is None for limit in clips)


def _dense_or_slices(grad: Any) -> Any:
    return grad if isinstance(grad, tf.IndexedSlices) else tf.convert_to_tensor(grad)


def _check_context(optimizer: Any) -> None:
    """Raises ConfigError for an optimizer made outside the scope; warns when gradients would stay unreduced."""
    mine = keras_compat.strategy_of(optimizer)
    running = keras_compat.replica_strategy()
    if running is not None and mine is not running:
        raise ConfigError(outside_message("An optimizer", optimizer.name, running, mine))
    if mine is not None and running is None and mine.size > 1 and not getattr(optimizer, "_ddl_warned", False):
        object.__setattr__(optimizer, "_ddl_warned", True)
        stack_position.warn(
            f"Optimizer {optimizer.name!r} was made under a keras_ddl.Strategy but applies gradients outside of "
            f"strategy.run: they are this rank's own (rank {mine.rank} of {mine.size}), and the ranks' weights will "
            "drift apart unless you have reduced them yourself (keras_ddl.all_reduce_n). Call the step with "
            "strategy.run(step, args=(batch,))."
        )


def outside_message(what: str, name: str, strategy: Any, other: Any = None) -> str:
    """The message for a model or an optimizer made outside the scope of `strategy`, maybe in that of another."""
    if other is not None:
        return (
            "What is trained together must be made under one keras_ddl.Strategy. "
            f"Received: {name!r}, made under one {one_per_job.differences(other, strategy)} (rank {strategy.rank}). "
            "Make one Strategy with the settings that you want, and use its scope everywhere."
        )
    return (
        f"{what} that is trained under a keras_ddl.Strategy must be made inside its scope. "
        f"Received: {name!r}, made outside (rank {strategy.rank}). Move the line that makes it under "
        "`with strategy.scope():`."
    )
