"""DistributedOptimizer: an optimizer that averages gradients over the ranks before it uses them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from keras_ddl import ops
from keras_ddl.compat import keras as keras_compat
from keras_ddl.compat import models
from keras_ddl.compat.keras import keras
from keras_ddl.compat.optimizers import delegates_updates, original_step, replace_steps
from keras_ddl.compat.tensorflow import tf
from keras_ddl.errors import ConfigError
from keras_ddl.gradients import own_reductions
from keras_ddl.horovod.basics import ReduceOp
from keras_ddl.horovod.keras_patches import counting_updates, install
from keras_ddl.horovod.reduction import GradientReduction, check_may_reduce
from keras_ddl.strategy import keras_patches


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    *,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = None,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: str = ReduceOp.Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """Makes an optimizer average its gradients over the ranks, then clip and apply them.

    It modifies and returns `optimizer` itself, which keeps its class, state and configuration, so saved files load
    without keras_ddl. In a LossScaleOptimizer the inner optimizer reduces; the ranks agree on skipped steps. Models are
    compiled with jit_compile=False, because XLA has no kernel for collectives. The optimizer gets a method
    register_local_var(variable), which makes that variable's gradients stay local to each rank. A copy by copy.deepcopy
    also reduces. Pickled or saved copies, and copies made from its configuration, are plain Keras optimizers and do not
    reduce.

    An optimizer of tf.compat.v1.train is also modified and returned: compute_gradients returns averages, which a script
    may change before it passes them to apply_gradients. apply_gradients averages only gradients that were not computed
    from averages.

    Args:
        optimizer: an optimizer of Keras 3 or tf.compat.v1.train, created outside of a keras_ddl.Strategy. Variables
            must be equal on all ranks when training begins: use `callbacks.BroadcastGlobalVariablesCallback(0)`,
            `broadcast_variables` or, in sessions, `BroadcastGlobalVariablesHook(0)`.
        name: name of the reductions in errors and timelines; default: "Distributed" and the optimizer's class.
        use_locking, device_dense, device_sparse: ignored.
        compression: compression of dense gradients, see `GradientReduction`.
        sparse_as_dense: reduce gradients of embeddings as dense tables, instead of gathering rows.
        gradient_predivide_factor: as in `GradientReduction`.
        op: Average or Sum.
        backward_passes_per_step: batches per update. Each rank sums its own gradients, and the sum is reduced once per
            update. `iterations`, and so every schedule, counts batches. For tf.compat.v1.train: session runs per
            update; the sums are local variables, and `global_step` counts runs.
        average_aggregated_gradients: divide the sum by the number of batches.
        num_groups, groups: as in `GradientReduction`; num_groups is the old name.
        process_set: the ranks that take part; default: all.
        scale_local_gradients: see `PartialDistributedOptimizer`.
    Returns: `optimizer`.
    Raises: ConfigError: the optimizer is of another kind, already reduces, or belongs to a keras_ddl.Strategy; or
        arguments contradict each other.
    """
    return _distribute(
        optimizer,
        name,
        backward_passes_per_step,
        average_aggregated_gradients,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        op=op,
        groups=num_groups or None if groups is None else groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )


def PartialDistributedOptimizer(
    optimizer: keras.optimizers.Optimizer,
    name: str | None = None,
    *,
    local_layers: keras.layers.Layer | Iterable[keras.layers.Layer] | None = None,
    **arguments: Any,
) -> keras.optimizers.Optimizer:
    """Works like `DistributedOptimizer`, except that the weights of `local_layers` stay local to each rank.

    Args:
        local_layers: a layer or several, which may be built later.
        arguments: as in `DistributedOptimizer`. With scale_local_gradients=True, the default, gradients of local
            layers are divided by the number of ranks, because the total loss is the mean of the ranks' losses.
    """
    local = layers_of(local_layers)
    DistributedOptimizer(optimizer, name, **arguments)
    own_reductions.reduction_of(models.unwrapped(optimizer)).local_layers += local
    return optimizer


def layers_of(layers: keras.layers.Layer | Iterable[keras.layers.Layer] | None) -> list[keras.layers.Layer]:
    """Returns `local_layers` as a list. Raises: ConfigError: they are not layers."""
    result = [layers] if isinstance(layers, keras.layers.Layer) else list(layers or ())
    wrong = [each for each in result if not isinstance(each, keras.layers.Layer)]
    if wrong:
        raise ConfigError(f"local_layers must be Keras layers. Received: {wrong[0]!r}.")
    return result


def _distribute(
    optimizer: Any,
    name: str | None,
    passes: int,
    average_passes: bool,
    **arguments: Any,
) -> Any:
    """Makes an optimizer reduce; see `DistributedOptimizer`."""
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        return _distribute_graph_optimizer(optimizer, name, passes, average_passes, **arguments)
    inner = models.unwrapped(optimizer)
    _check(optimizer, inner, arguments["op"])
    label = name or f"Distributed{type(inner).__name__}"
    reduction = GradientReduction(label, **arguments)
    factor = _accumulate(inner, passes, average_passes)
    keras_patches.install()
    install()
    # Bypasses Keras's tracking: neither is saved or restored. They are set on the object instead of a subclass, so that
    # Keras saves the optimizer's own class.
    own_reductions.set_reduction(inner, reduction)
    replace_steps(inner, _ReducingSteps(inner, reduction, factor).by_name())
    distribute = functools.partial(_distribute, name=name, passes=passes, average_passes=average_passes, **arguments)
    for part in {id(each): each for each in (optimizer, inner)}.values():
        object.__setattr__(part, "register_local_var", reduction.register_local_var)
        object.__setattr__(part, "__deepcopy__", functools.partial(_copy, part, reduction, distribute))
    return optimizer


def _copy(optimizer: Any, reduction: GradientReduction, distribute: Callable[[Any], Any], memo: dict[int, Any]) -> Any:
    """Implements copy.deepcopy. Keras copies only what it would save, so the copy must be made to reduce again."""
    kind: Any = type(optimizer)
    make, arguments = kind.__reduce__(optimizer)
    copied = distribute(make(*arguments))
    copied_reduction = own_reductions.reduction_of(models.unwrapped(copied))
    copied_reduction.local_variables += reduction.local_variables
    copied_reduction.local_layers += reduction.local_layers
    memo[id(optimizer)] = copied
    return copied


def _distribute_graph_optimizer(
    optimizer: Any, name: str | None, passes: int, average_passes: bool, **arguments: Any
) -> Any:
    from keras_ddl.horovod import graph_optimizer

    check_may_reduce(optimizer, arguments["op"])
    _check_passes(passes)
    reduction = GradientReduction(name or f"Distributed{type(optimizer).__name__}", **arguments)
    graph_optimizer.distribute(optimizer, reduction, passes, average_passes)
    return optimizer


def _check(optimizer: Any, inner: Any, op: str) -> None:
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ConfigError(
            "DistributedOptimizer takes an optimizer of Keras 3 or of tf.compat.v1.train, not its name, nor one of "
            f"legacy Keras. Received: {optimizer!r}. Pass keras.optimizers.SGD(...) or another of keras.optimizers."
        )
    if delegates_updates(inner):
        raise ConfigError(
            f"DistributedOptimizer takes optimizers that update variables. Received: {type(inner).__name__}, which "
            "delegates to other optimizers. Pass each of those through DistributedOptimizer."
        )
    check_may_reduce(inner, op)
    if keras_compat.strategy_of(inner) is not None:
        raise ConfigError(
            f"Gradients must be reduced only once. Received: optimizer {inner.name!r}, which was made under a "
            "keras_ddl.Strategy and reduces gradients there. Leave out DistributedOptimizer, or the Strategy."
        )


def _accumulate(optimizer: Any, passes: int, average: bool) -> float:
    """Enables Keras's gradient accumulation, which averages; returns the factor by which the mean is multiplied."""
    _check_passes(passes)
    if passes == 1:
        return 1.0
    steps = optimizer.gradient_accumulation_steps
    if steps not in (None, passes):
        raise ConfigError(
            "backward_passes_per_step and gradient_accumulation_steps of the optimizer are the same thing. "
            f"Received: {passes} and {steps}. Leave out one of them."
        )
    if optimizer.built and not steps:
        raise ConfigError(
            "backward_passes_per_step needs an optimizer that is not built yet. Received: "
            f"{optimizer.name!r}, which is built. Call DistributedOptimizer before the first step."
        )
    optimizer.gradient_accumulation_steps = passes
    return 1.0 if average else float(passes)


def _check_passes(passes: Any) -> None:
    if type(passes) is not int or passes < 1:
        raise ConfigError(f"backward_passes_per_step must be a whole number, 1 or more. Received: {passes!r}.")


class _ReducingSteps:
    """Replaces steps of an optimizer's update to reduce gradients. Keras then clips, decays and applies the results.

    With gradient accumulation, Keras clips once per update, in the branch of the graph that updates. The sum is reduced
    in this branch. All ranks count batches equally, so all take the branch in the same step.
    """

    def __init__(self, optimizer: Any, reduction: GradientReduction, factor: float) -> None:
        self._optimizer = optimizer
        self._reduction = reduction
        self._factor = factor
        self._variables: list[Any] | None = None  # variables of the accumulated gradients in `clip`

    def by_name(self) -> dict[str, Callable[..., Any]]:
        return {"apply": self.apply, "update": self.update, "clip": self.clip, "overwrite": self.overwrite}

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any]) -> Any:
        optimizer = self._optimizer
        accumulates = bool(optimizer.gradient_accumulation_steps)
        self._reduction.check_reduced_once(grads, trainable_variables, accumulates=accumulates)
        if not accumulates:
            grads = self._reduction.reduce(grads, trainable_variables)
            return original_step(optimizer, "apply")(grads, trainable_variables)
        self._variables = list(trainable_variables)
        try:
            return original_step(optimizer, "apply")(grads, trainable_variables)
        finally:
            self._variables = None

    def update(self, *args: Any, **kwargs: Any) -> Any:
        """Lets `iterations` count updates, for the bias correction of momenta. Elsewhere it counts batches."""
        with counting_updates(True):
            return original_step(self._optimizer, "update")(*args, **kwargs)

    def clip(self, grads: Sequence[Any]) -> Any:
        if self._variables is not None:
            grads = self._reduction.reduce(grads, self._variables)
            if self._factor != 1.0:
                grads = [grad if grad is None else grad * self._factor for grad in grads]
        return original_step(self._optimizer, "clip")(grads)

    def overwrite(self, grads: Sequence[Any], variables: Sequence[Any]) -> Any:
        """Reduces with max for variables whose "gradient" is their new value (float8 scales)."""
        reduction = self._reduction
        grads = [
            ops.all_reduce(grad, op="max", name=f"{reduction.name}/overwrite_{i}", comm=reduction.comm)
            if getattr(variable, "overwrite_with_gradient", False)
            and reduction.takes_part
            and not reduction.is_local(variable)
            else grad
            for i, (grad, variable) in enumerate(zip(grads, variables))
        ]
        return original_step(self._optimizer, "overwrite")(grads, variables)
