"""DistributedOptimizer for the optimizers of tf.compat.v1.train, which Horovod wraps as well.

These optimizers are for graphs and sessions; without gradient accumulation they also work in eager mode and in a
tf.function.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from keras_ddl import communicator
from keras_ddl.compat import replacing
from keras_ddl.compat.tensorflow import is_eager, tf
from keras_ddl.errors import ConfigError
from keras_ddl.gradients import own_reductions, reduced
from keras_ddl.gradients.graph_optimizers import Pairs, reduce_within
from keras_ddl.horovod.reduction import GradientReduction


def distribute(optimizer: Any, reduction: GradientReduction, passes: int, average_passes: bool) -> None:
    """Makes an optimizer of tf.compat.v1.train reduce its gradients.

    compute_gradients returns reduced gradients; apply_gradients reduces only gradients not computed from reduced ones.

    Args:
        reduction: how gradients are reduced.
        passes: session runs per update; above 1, see `_Accumulation`.
        average_passes: divide the sum over `passes` by their number.
    """
    own_reductions.set_reduction(optimizer, reduction)
    object.__setattr__(optimizer, "register_local_var", reduction.register_local_var)
    if passes == 1:
        once = _Once(reduction)
        reduce_within(optimizer, once.computed, once.applied)
    else:
        _Accumulation(optimizer, reduction, passes, average_passes)


class _Once:
    """Reduces each gradient once: when it is computed, or else when it is applied.

    In eager mode nothing shows that a gradient was computed from a reduced one. So the optimizer remembers the
    variables whose gradients compute_gradients has reduced, and the next apply_gradients does not reduce these.
    """

    def __init__(self, reduction: GradientReduction) -> None:
        self._reduction = reduction
        self._computed: dict[Any, int] = {}  # in eager mode: computations since the last apply
        self._left: set[Any] = set()  # computed more often than applied, so more may be applied later

    def computed(self, pairs: Pairs) -> Pairs:
        """Returns the result of compute_gradients."""
        result = self._reduced(pairs)
        if tf.executing_eagerly():
            for variable in _variables(pairs):
                self._computed[variable] = self._computed.get(variable, 0) + 1
        return result

    def applied(self, pairs: Pairs) -> Pairs:
        """Returns the gradients that apply_gradients applies. Raises: ConfigError: unknown whether they are reduced."""
        if not tf.executing_eagerly():
            return self._reduced(pairs)
        todo = [i for i, (_, v) in enumerate(pairs) if v.ref() not in self._computed]
        for variable in _variables(pairs) & self._computed.keys():
            is_last = self._computed.pop(variable) == 1
            (self._left.discard if is_last else self._left.add)(variable)
        self._check(pairs[i] for i in todo)
        if todo:
            self._reduction.check_reduced_once(*zip(*(pairs[i] for i in todo)), accumulates=False)
        result = list(pairs)
        for i, pair in zip(todo, self._reduced([pairs[i] for i in todo])):
            result[i] = pair
        return result

    def _check(self, pairs: Iterable[tuple[Any, Any]]) -> None:
        for gradient, variable in pairs:
            if gradient is not None and variable.ref() in self._left and not reduced.is_noted(gradient):
                raise ConfigError(
                    "In eager mode, apply_gradients must follow each compute_gradients: otherwise keras_ddl cannot "
                    "tell whether a gradient that was changed in between is already reduced. Received: a gradient of "
                    f"the variable {variable.name}, applied after compute_gradients was called several times (rank "
                    f"{communicator.rank()}). Call apply_gradients after each compute_gradients, or once with the sum "
                    "of the gradients, or make both calls in a tf.function."
                )

    def _reduced(self, pairs: Pairs) -> Pairs:
        there = [i for i, (gradient, _) in enumerate(pairs) if gradient is not None]
        todo = [i for i, done in zip(there, reduced.are_reduced(pairs[i][0] for i in there)) if not done]
        gradients, variables = [pairs[i][0] for i in todo], [pairs[i][1] for i in todo]
        result = list(pairs)
        for i, before, after in zip(todo, gradients, self._reduction.reduce(gradients, variables) if todo else ()):
            # A new tensor, because on ranks that take no part, another optimizer may still reduce the gradient itself.
            after = tf.nest.map_structure(tf.identity, after, expand_composites=True)
            reduced.note(before, after)
            result[i] = (after, pairs[i][1])
        return result


def _variables(pairs: Pairs) -> set[Any]:
    return {variable.ref() for gradient, variable in pairs if gradient is not None}


class _Accumulation:
    """Adds up the gradients of several runs of a graph; the last of them reduces the sum and applies it.

    As in Horovod, the sums are local variables: `tf.compat.v1.local_variables_initializer` sets them, and they are
    neither saved nor broadcast. Every run increments `global_step`. tf.IndexedSlices become dense.
    """

    def __init__(self, optimizer: Any, reduction: GradientReduction, passes: int, average: bool) -> None:
        self._apply = optimizer.apply_gradients
        self._reduction, self._passes, self._factor = reduction, passes, 1 / passes if average else 1.0
        self._is_last: Any = None  # tensor in the graph of the last compute_gradients

        def compute(original: Any, *args: Any, **kwargs: Any) -> Pairs:
            return self.compute(original(*args, **kwargs))

        def apply(_: Any, grads_and_vars: Any, global_step: Any = None, name: str | None = None) -> Any:
            return self.apply(list(grads_and_vars), global_step, name)

        replacing.replace([(optimizer, "compute_gradients", compute), (optimizer, "apply_gradients", apply)])

    def compute(self, pairs: Pairs) -> Pairs:
        """Returns the sums: reduced in the last of `passes` runs, this rank's sums so far in the others."""
        there = [(tf.convert_to_tensor(gradient), variable) for gradient, variable in pairs if gradient is not None]
        if tf.executing_eagerly() or tf.inside_function() or any(is_eager(gradient) for gradient, _ in there):
            raise ConfigError(
                "backward_passes_per_step above 1 needs a TensorFlow 1 graph for an optimizer of tf.compat.v1.train. "
                f"Received: backward_passes_per_step={self._passes}, outside of such a graph. Pass an optimizer of "
                "keras.optimizers."
            )
        count = _local(self._reduction.name, "passes", [], tf.int32)
        sums = [_local(self._reduction.name, f"sum_{i}", v.shape, g.dtype) for i, (g, v) in enumerate(there)]
        done = count.read_value()
        self._is_last = tf.equal(done, self._passes - 1)
        totals = [total.read_value() + gradient for total, (gradient, _) in zip(sums, there)]
        result = tf.cond(self._is_last, lambda: self._reduce(totals, [v for _, v in there]), lambda: list(totals))
        with tf.control_dependencies([*totals, done]):
            updates = [count.assign((done + 1) % self._passes).op]
            updates += [s.assign(tf.where(self._is_last, tf.zeros_like(t), t)).op for s, t in zip(sums, totals)]
        with tf.control_dependencies(updates):
            gradients = iter([tf.identity(each) for each in result])
        return [(gradient if gradient is None else next(gradients), variable) for gradient, variable in pairs]

    def apply(self, pairs: Pairs, global_step: Any, name: str | None) -> Any:
        """Returns an operation that applies the gradients in the last of `passes` runs."""
        graph = tf.compat.v1.get_default_graph()
        if self._is_last is None or self._is_last.graph is not graph:
            raise ConfigError(
                "With backward_passes_per_step above 1, the gradients must come from compute_gradients, which adds "
                "them up. Received: apply_gradients with other gradients. Call compute_gradients, or minimize."
            )

        def skip() -> tf.Operation:
            return tf.no_op() if global_step is None else tf.compat.v1.assign_add(global_step, 1).op

        with tf.control_dependencies([gradient for gradient, _ in pairs if gradient is not None]):
            return tf.cond(self._is_last, lambda: self._apply(pairs, global_step=global_step, name=name), skip)

    def _reduce(self, totals: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        gradients = self._reduction.reduce(totals, variables)
        return gradients if self._factor == 1.0 else [gradient * self._factor for gradient in gradients]


def _local(scope: str, name: str, shape: Any, dtype: Any) -> Any:
    """Returns a new variable of zeros that is neither saved nor broadcast."""
    v1 = tf.compat.v1
    collections = [v1.GraphKeys.LOCAL_VARIABLES]
    with tf.init_scope(), tf.device("CPU"):
        return v1.Variable(
            tf.zeros(shape, dtype), trainable=False, collections=collections, use_resource=True, name=f"{scope}/{name}"
        )
