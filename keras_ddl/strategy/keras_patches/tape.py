"""The patches of tf.GradientTape and tf.gradients: in a step of Keras, the gradient of a loss by variables is that of
one process.

It is summed over ranks where it is taken, not where it is applied. So whatever a step does with it, clipping by hand,
norms, several optimizers, a second backpropagation, sees equal values on all ranks, those one process would see. The
ranks' shares of the rows weigh in as what backpropagation begins with, which costs nothing.

Patched: tensorflow/python/eager/backprop.py, ops/gradients_impl.py (TensorFlow 2.21).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from keras_ddl.communicator import stack_position
from keras_ddl.communicator.stack_position import user_line
from keras_ddl.compat import keras as keras_compat
from keras_ddl.compat.keras import keras
from keras_ddl.compat.tensorflow import tf
from keras_ddl.strategy import buckets, step
from keras_ddl.strategy.keras_patches.optimizer import accumulates, tables_of
from keras_ddl.strategy.row_kinds import INDEPENDENT, SUM
from keras_ddl.strategy.row_values import flat_targets
from keras_ddl.strategy.thread_value import ThreadValue

_backpropagating = ThreadValue(False)


def gradient(original: Callable[..., Any]) -> Callable[..., Any]:
    """Takes gradients by variables of the value that one process would have computed."""

    def wrapper(self, target, sources, output_gradients=None, unconnected_gradients=tf.UnconnectedGradients.NONE):
        strategy, running = keras_compat.replica_strategy(), step.current()
        flat = tf.nest.flatten(sources)
        by_variable = [isinstance(each, (tf.Variable, keras.Variable)) for each in flat]
        if strategy is not None and running is None and any(by_variable):
            _warn_of_bare_means(strategy, target)
        inside = _backpropagating.get()  # a gradient by hand takes one of its own (recompute_grad)
        if strategy is None or running is None or inside or not (any(by_variable) or running.values.kinds is not None):
            return original(self, target, sources, output_gradients, unconnected_gradients)

        def take(targets, seeds):
            return original(self, targets, flat, seeds, unconnected_gradients)

        found = _of_all_ranks(running, strategy, target, flat, output_gradients, take)
        if found is None:
            return original(self, target, sources, output_gradients, unconnected_gradients)
        return tf.nest.pack_sequence_as(sources, found)

    return wrapper


def gradients(original: Callable[..., Any]) -> Callable[..., Any]:
    """The same for tf.gradients, by variables."""

    def wrapper(ys, xs, grad_ys=None, *args, **kwargs):
        strategy, running = keras_compat.replica_strategy(), step.current()
        flat = tf.nest.flatten(xs)
        by_variable = any(isinstance(each, (tf.Variable, keras.Variable)) for each in flat)
        if strategy is None or running is None or _backpropagating.get() or not by_variable:
            return original(ys, xs, grad_ys, *args, **kwargs)
        flat = [each.value if isinstance(each, keras.Variable) else each for each in flat]
        found = _of_all_ranks(
            running,
            strategy,
            ys,
            flat,
            grad_ys,
            lambda targets, seeds: original(targets, flat, seeds, *args, **kwargs),
        )
        return original(ys, xs, grad_ys, *args, **kwargs) if found is None else found

    return wrapper


def _of_all_ranks(
    running: step.Step,
    strategy: Any,
    target: Any,
    sources: Sequence[Any],
    output_gradients: Any,
    take: Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]],
) -> list[Any] | None:
    """Returns the gradients of `target` that one process would have; None where there is nothing to take them of.

    `take`: given targets and what backpropagation begins with at each, returns this rank's gradients by `sources`.
    """
    targets, seeds = _seeds(running, target, output_gradients)
    if not targets:
        return None
    with _backpropagating.set_to(True):
        local = list(take(targets, seeds))
    found = [
        i
        for i, each in enumerate(sources)
        if isinstance(each, (tf.Variable, keras.Variable))
        and local[i] is not None
        and not getattr(each, "overwrite_with_gradient", False)
    ]
    for i, reduced in zip(found, _over_ranks(running, strategy, [local[i] for i in found])):
        local[i] = reduced
    _mark_rows(running, sources, local)
    return local


def _warn_of_bare_means(strategy: Any, target: Any) -> None:
    """In a loop of the program's own gradients are summed: a mean over the rank's rows must be made a part first."""
    kinds = step.innermost().values.kinds
    if kinds is None or getattr(strategy, "_ddl_warned_of_means", False):
        return
    found = next((each for each in flat_targets(target) if kinds.is_bare_mean(each, strategy.size)), None)
    if found is None:
        return
    strategy._ddl_warned_of_means = True
    where = user_line(getattr(found.op, "traceback", None)) or found.op.name
    stack_position.warn(
        "In strategy.run gradients are summed over ranks, as in tf.distribute: a loss must be the rank's part of that "
        f"of the whole batch. Received: a mean over the rank's own rows, made in {where} (rank {strategy.rank} of "
        f"{strategy.size}), whose gradient would be {strategy.size} times that of one process. Use a keras.losses "
        "object, which is scaled for you, or tf.nn.compute_average_loss(per_row, global_batch_size=...), or write the "
        "step as the train_step of a model, where a mean is what it says."
    )


def jacobian(original: Callable[..., Any]) -> Callable[..., Any]:
    """Leaves the derivatives of each row alone: they are rows, and are reduced when something is made of them."""

    def wrapper(self, target, sources, *args, **kwargs):
        running = step.current()
        if running is None or keras_compat.replica_strategy() is None:
            return original(self, target, sources, *args, **kwargs)
        with _backpropagating.set_to(True):
            found = original(self, target, sources, *args, **kwargs)
        kinds = running.values.kinds
        if kinds is not None and kinds.of(target).name == "rows":
            for each in tf.nest.flatten(found):
                if each is not None:
                    kinds.mark(each, kinds.of(target))
        return found

    return wrapper


def _mark_rows(running: step.Step, sources: Sequence[Any], gradients: Sequence[Any]) -> None:
    """The gradient by rows is rows, those that one process would have: the seeds have seen to that."""
    kinds = running.values.kinds
    for source, found in zip(sources, gradients):
        if kinds is None or not isinstance(source, tf.Tensor) or not isinstance(found, tf.Tensor):
            continue
        kind = kinds.of(source)
        if kind.name == "rows" and not kind.mixed and not kind.power:
            kinds.mark(found, kind)


def _seeds(running: step.Step, target: Any, output_gradients: Any) -> tuple[list[Any], list[Any]]:
    targets = flat_targets(target)
    given = [None] * len(targets) if output_gradients is None else tf.nest.flatten(output_gradients)
    parts, seeds = [], []
    for each, factor in zip(targets, given):
        for part, seed in zip(*running.values.seeds(each)):
            parts.append(part)
            seeds.append(seed if factor is None else seed * tf.cast(running.values.of_rows(factor), seed.dtype))
    return parts, seeds


def _over_ranks(running: step.Step, strategy: Any, gradients: Sequence[Any]) -> list[Any]:
    """Sums over ranks; where an optimizer accumulates, that is left to it: once for each update."""
    held = keras_compat.optimizers_of(running.model)
    optimizers = [part for each in held for part in keras_compat.optimizers_in(each)]
    kinds = running.values.kinds
    if any(accumulates(optimizer) for optimizer in optimizers):
        running.gradients = "parts"
        for each in gradients if kinds is not None else ():
            kinds.mark(each.values if isinstance(each, tf.IndexedSlices) else each, SUM)
        return list(gradients)
    running.gradients = "reduced"
    reduced = buckets.all_reduce_in_buckets(
        [each if isinstance(each, tf.IndexedSlices) else tf.convert_to_tensor(each) for each in gradients],
        op="sum",
        name=f"{keras_compat.plain_name(running.model.name)}/gradients",
        bucket_size=strategy.extended.bucket_size,
        tables=tables_of(strategy, optimizers),
    )
    for each in reduced if kinds is not None else ():
        kinds.mark(each.values if isinstance(each, tf.IndexedSlices) else each, INDEPENDENT)
    return reduced
