"""DistributedGradientTape: a tf.GradientTape whose gradients are averaged over the ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from keras_ddl.compat.keras import keras
from keras_ddl.compat.tensorflow import do_not_convert, tf
from keras_ddl.errors import ConfigError
from keras_ddl.horovod.basics import ReduceOp
from keras_ddl.horovod.optimizer import layers_of
from keras_ddl.horovod.reduction import GradientReduction, mark_reduced


class _DistributedGradientTape(tf.GradientTape):
    """Stands in for a tape with which it shares all state, so that it may be made before or after recording."""

    # Not in that state: a persistent tape may stand behind several.
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
        """Returns the gradients of `target` by `sources`, reduced over the ranks. COLLECTIVE.

        Args:
            target, sources, output_gradients, unconnected_gradients: as for tf.GradientTape.
            use_generic_names: does nothing here. A bool in the place of unconnected_gradients is taken for it, as it
                comes fourth in Horovod.
        Raises: tf.errors.FailedPreconditionError: the ranks' gradients differ in number, shape or dtype.
        """
        if isinstance(unconnected_gradients, bool):
            unconnected_gradients = tf.UnconnectedGradients.NONE
        found = super().gradient(target, sources, output_gradients, unconnected_gradients)
        # IndexedSlices count as one leaf each, as sources do.
        flat = tf.nest.flatten(found)
        reduced = self._ddl_reduction.reduce(flat, tf.nest.flatten(sources))
        mark_reduced(reduced)
        return tf.nest.pack_sequence_as(sources, reduced)

    def register_local_source(self, source: Any) -> None:
        """Leaves the gradients by a variable to each rank: they are not reduced. See `scale_local_gradients`."""
        self._ddl_reduction.local_variables.append(source)

    def get_local_and_global_gradients(
        self, target: Any, sources: Sequence[Any], output_gradients: Any = None, use_generic_names: bool = False
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """Returns what `gradient` does, apart: norms, for instance, are equal on all ranks of the second part only.

        Returns: pairs (source, gradient) of the sources that are this rank's own, and of those that are reduced.
        """
        pairs = list(zip(sources, self.gradient(target, sources, output_gradients)))
        apart: tuple[list[Any], list[Any]] = ([], [])
        for source, gradient in pairs:
            apart[0 if self._ddl_reduction.is_local(source) else 1].append((source, gradient))
        return apart


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
    """Returns a tape that goes on where `gradtape` is, and whose `gradient` reduces over the ranks.

    Apply what it returns with a plain optimizer, or a DistributedOptimizer, which leaves it as it is. Other methods
    (`jacobian`, `batch_jacobian`) stay this rank's own.

    Args:
        gradtape: recording, or done, or not begun.
        device_dense, device_sparse: do nothing here.
        op: Average, Sum, Min, Max, Product or Adasum.
        compression, sparse_as_dense, gradient_predivide_factor, num_groups, groups, process_set,
            scale_local_gradients: as for `DistributedOptimizer`.
    Raises: ConfigError: something that is no tape, one that reduces already, or arguments that do not go together.
    """
    if not isinstance(gradtape, tf.GradientTape) or isinstance(gradtape, _DistributedGradientTape):
        raise ConfigError(
            "DistributedGradientTape takes a tf.GradientTape, once: gradients are reduced once. "
            f"Received: {type(gradtape).__name__.lstrip('_')}. Pass tf.GradientTape()."
        )
    # A class for each kind of tape: one of the program's own keeps its methods.
    kind = type(gradtape)
    made: Any = (
        _DistributedGradientTape
        if kind is tf.GradientTape
        else type(kind.__name__, (_DistributedGradientTape, kind), {})
    )
    tape = made.__new__(made)
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
    """Does what `DistributedGradientTape` does, except for the weights of `local_layers`: see
    `PartialDistributedOptimizer`.
    """
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
