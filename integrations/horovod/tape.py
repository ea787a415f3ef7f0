"""DistributedGradientTape: a tf.GradientTape whose gradients are averaged over the ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from keras_ddl.compat.keras import keras
from keras_ddl.compat.tensorflow import do_not_convert, tf
from keras_ddl.errors import ConfigError
from keras_ddl.gradients import reduced
from keras_ddl.horovod.basics import ReduceOp
from keras_ddl.horovod.optimizer import layers_of
from keras_ddl.horovod.reduction import GradientReduction, plain


class _DistributedGradientTape(tf.GradientTape):
    """Wraps a tape and shares its state, so that it may be created before or after recording."""

    # Not in the shared state, because several of these may wrap one persistent tape.
    __slots__ = ("_ddl_reduction",)

    @do_not_convert
    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
        use_generic_names: bool = False,
    ) -> Any:
        """Returns the gradients of `target` with respect to `sources`, reduced over the ranks. COLLECTIVE.

        Args:
            target, sources, output_gradients, unconnected_gradients: as in tf.GradientTape.
            use_generic_names: ignored. It is Horovod's fourth argument, so a bool in unconnected_gradients counts as
                use_generic_names.
        Raises: tf.errors.FailedPreconditionError: the ranks' gradients differ in number, shape or dtype.
        """
        if isinstance(unconnected_gradients, bool):
            unconnected_gradients = tf.UnconnectedGradients.NONE
        gradients = super().gradient(target, sources, output_gradients, unconnected_gradients)
        flat = tf.nest.flatten(gradients)  # each IndexedSlices is one leaf
        variables = tf.nest.flatten(sources)
        results = self._ddl_reduction.reduce(flat, variables)
        for each, variable in zip(results, variables):
            if each is not None:  # for a DistributedOptimizer that applies them
                reduced.note(each, each)
                reduced.note_variable(plain(variable))
        return tf.nest.pack_sequence_as(sources, results)

    def register_local_source(self, source: Any) -> None:
        """Adds a variable whose gradients stay local to each rank. See `scale_local_gradients`."""
        self._ddl_reduction.local_variables.append(source)

    def get_local_and_global_gradients(
        self, target: Any, sources: Sequence[Any], output_gradients: Any = None, use_generic_names: bool = False
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """Computes `gradient`, and separates local from reduced gradients. Only reduced ones are equal on all ranks.

        Returns: pairs (source, gradient) of local sources, and of reduced ones.
        """
        pairs = list(zip(sources, self.gradient(target, sources, output_gradients)))
        separated: tuple[list[Any], list[Any]] = ([], [])
        for source, gradient in pairs:
            separated[0 if self._ddl_reduction.is_local(source) else 1].append((source, gradient))
        return separated


@do_not_convert
def DistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = None,
    sparse_as_dense: bool = False,
    op: str = ReduceOp.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: Any = None,
    scale_local_gradients: bool = True,
) -> tf.GradientTape:
    """Returns a tape that continues `gradtape`, and whose `gradient` reduces over the ranks.

    Apply its gradients with a plain optimizer, or a DistributedOptimizer, which does not reduce them again. A
    DistributedOptimizer with op=Sum accepts the gradients themselves, and refuses values computed from them (clipped,
    scaled). Other methods (`jacobian`, `batch_jacobian`) are local to the rank.

    Args:
        gradtape: a tape before, during or after recording.
        device_dense, device_sparse: ignored.
        op: Average, Sum, Min, Max, Product or Adasum.
        compression, sparse_as_dense, gradient_predivide_factor, num_groups, groups, process_set,
            scale_local_gradients: as in `DistributedOptimizer`.
    Raises: ConfigError: `gradtape` is not a tape or already reduces, or arguments contradict each other.
    """
    if not isinstance(gradtape, tf.GradientTape) or isinstance(gradtape, _DistributedGradientTape):
        raise ConfigError(
            "DistributedGradientTape takes a tf.GradientTape, whose gradients are not reduced yet. Received: "
            f"{type(gradtape).__name__.lstrip('_')}. Pass tf.GradientTape()."
        )
    # A class for each kind of tape, so that custom tapes keep their methods.
    kind = type(gradtape)
    subclass: Any = (
        _DistributedGradientTape
        if kind is tf.GradientTape
        else type(kind.__name__, (_DistributedGradientTape, kind), {})
    )
    tape = subclass.__new__(subclass)
    tape.__dict__ = gradtape.__dict__
    tape._ddl_reduction = GradientReduction(
        "DistributedGradientTape",
        op=op,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        groups=num_groups or None if groups is None else groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    return tape


@do_not_convert
def PartialDistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = None,
    sparse_as_dense: bool = False,
    op: str = ReduceOp.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: Any = None,
    local_layers: keras.layers.Layer | Iterable[keras.layers.Layer] | None = None,
    scale_local_gradients: bool = True,
) -> tf.GradientTape:
    """Works like `DistributedGradientTape`, but `local_layers` stay local: see `PartialDistributedOptimizer`."""
    local = layers_of(local_layers)
    tape = DistributedGradientTape(
        gradtape,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        num_groups=num_groups,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    tape._ddl_reduction.local_layers += local
    return tape
