"""The reduction of gradients for DistributedOptimizer and DistributedGradientTape, with Horovod's arguments.

Gradients are reduced in buckets, as under the Strategy. But each rank computes gradients of its own loss, and the
result is their mean (or sum), not weighted by rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from keras_ddl import communicator, ops
from keras_ddl.communicator.group import Communicator
from keras_ddl.compat import keras as keras_compat
from keras_ddl.compat.keras import keras
from keras_ddl.compat.tensorflow import tf
from keras_ddl.errors import ConfigError, KerasDdlError
from keras_ddl.gradients import bucket_size, own_reductions
from keras_ddl.gradients import reduced as reduced_gradients
from keras_ddl.gradients.buckets import all_reduce_planned, plan_for
from keras_ddl.gradients.sparse import all_reduce_slices
from keras_ddl.horovod import process_sets
from keras_ddl.horovod.basics import ReduceOp, check_sparse, reduce_op
from keras_ddl.horovod.failures import as_tensorflow_errors


class GradientReduction:
    """Reduces lists of gradients over the ranks of a process set; results are equal on all of them.

    Args:
        name: name of the gradients in error messages and timelines.
        op: Average or Sum, or another ReduceOp.
        compression: an object with compress(tensor) -> (tensor, context) and decompress(tensor, context), for dense
            gradients; None: no compression.
        sparse_as_dense: convert IndexedSlices to dense tables, instead of gathering rows.
        gradient_predivide_factor: gradients are divided by it before the sum, and the sum is multiplied by it and
            divided by the number of ranks. Only for Average.
        groups: None: buckets as in the Strategy. A number: this many buckets with equal numbers of gradients. A list
            of lists of variables: the gradients of each list together; other gradients in buckets.
        process_set: a result of `add_process_set`; None: all ranks. A rank outside of it keeps its own gradients.
        scale_local_gradients: divide the gradients of local variables by the number of ranks, as if they were zero on
            other ranks.

    Attributes:
        local_variables, local_layers: lists, to which callers append, of variables and layers whose gradients stay
            local to this rank. Layers may be built later.
    Raises: ConfigError: arguments contradict each other.
    """

    def __init__(
        self,
        name: str,
        *,
        op: str = ReduceOp.Average,
        compression: Any = None,
        sparse_as_dense: bool = False,
        gradient_predivide_factor: float = 1.0,
        groups: int | Sequence[Sequence[Any]] | None = None,
        process_set: Any = None,
        scale_local_gradients: bool = True,
    ) -> None:
        self.op = reduce_op(op)
        if gradient_predivide_factor != 1.0 and self.op != ReduceOp.Average:
            raise ConfigError(
                "gradient_predivide_factor splits the division of a mean, so it needs op=Average. "
                f"Received: gradient_predivide_factor={gradient_predivide_factor!r}, op={self.op.name}."
            )
        if groups is not None and not isinstance(groups, (list, tuple)) and not (type(groups) is int and groups >= 0):
            raise ConfigError(
                f"groups must be a number, 0 or more, or a list of lists of variables. Received: groups={groups!r}."
            )
        self.name = name
        self.compression = compression
        self.sparse_as_dense = sparse_as_dense
        self.predivide = float(gradient_predivide_factor)
        self.groups = groups or None
        self.process_set = process_set
        self.local_variables: list[Any] = []
        self.local_layers: list[keras.layers.Layer] = []
        self.scale_local_gradients = scale_local_gradients

    @property
    def comm(self) -> Communicator:
        """The communicator of the ranks that take part. Raises: NotInitializedError before init()."""
        if self.process_set is None:
            return communicator.communicator_of(None)
        return process_sets.communicator_of(self.process_set)

    @property
    def size(self) -> int:
        """The number of ranks that take part. Raises: as `comm`."""
        return self.comm.size if self.process_set is None else process_sets.registered(self.process_set).size()

    @property
    def takes_part(self) -> bool:
        """Whether this rank takes part. Raises: as `comm`."""
        return self.process_set is None or process_sets.registered(self.process_set).included()

    @property
    def is_active(self) -> bool:
        """Whether this rank's gradients are currently reduced with other ranks' gradients."""
        try:
            return self.takes_part and self.size > 1
        except KerasDdlError:  # the process set was removed, or keras_ddl shut down
            return False

    def register_local_var(self, var: Any) -> None:
        """Adds a variable whose gradients stay local to each rank."""
        self.local_variables.append(var)

    def is_local(self, variable: Any) -> bool:
        """Whether the gradient of a variable stays local to this rank."""
        return id(plain(variable)) in self._local_ids()

    @as_tensorflow_errors
    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Returns the reduced gradients, in the same order. COLLECTIVE.

        Args:
            gradients: dense tensors, tf.IndexedSlices and None, of equal kinds on all ranks. Gradients that
                `gradients.reduced` knows as reduced are not changed.
            variables: the variable of each gradient.
        Raises: tf.errors.FailedPreconditionError: the ranks' gradients differ in number, shape or dtype. ConfigError:
            the op does not support IndexedSlices.
        Cost: one all-reduce per bucket; for IndexedSlices two all-gathers, except for parts that are complete tables,
            which are all-reduced (`gradients.sparse`).
        """
        check_no_strategy(f"{self.name} reduces", tf.distribute.has_strategy())
        result, local, size = list(gradients), self._local_ids(), self.size
        comm = self.comm if self.takes_part else None
        dense = []
        for i, (gradient, variable) in enumerate(zip(gradients, variables)):
            if gradient is None or reduced_gradients.is_noted(gradient):
                continue
            if id(plain(variable)) in local:
                result[i] = _scaled(gradient, 1 / size) if self.scale_local_gradients else gradient
            elif comm is None:
                continue
            elif isinstance(gradient, tf.IndexedSlices) and not self.sparse_as_dense:
                check_sparse(self.op)
                name = f"{self.name}/sparse_{i}"
                # As in Horovod: the rows of all ranks, even with equal indices.
                result[i] = all_reduce_slices(gradient, op=self.op, name=name, compare=False, comm=comm)
            else:
                result[i] = tf.convert_to_tensor(gradient)
                dense.append(i)
        if comm is None:
            return result
        packed = [self._before(result[i], size) for i in dense]
        tensors = [tensor for tensor, _ in packed]
        plan = self._plan(tensors, [variables[i] for i in dense], comm)
        op = "sum" if self.predivide != 1.0 else self.op
        for i, reduced, (_, context) in zip(
            dense, all_reduce_planned(tensors, plan, op=op, name=self.name, comm=comm), packed
        ):
            result[i] = self._after(reduced, context, size)
        return result

    def check_reduced_once(self, gradients: Sequence[Any], variables: Sequence[Any], *, accumulates: bool) -> None:
        """Checks that an optimizer does not change gradients of a DistributedGradientTape, which are already reduced.

        A mean of values that are equal on all ranks changes nothing; a sum, or dividing a local gradient, does.

        Args:
            accumulates: the optimizer adds up gradients and reduces the sum; nothing shows that the sum is reduced.
        Raises: ConfigError: reducing would change a gradient that is already reduced, or in eager mode may be.
        """
        local = self._local_ids()
        again = []
        for gradient, variable in zip(gradients, map(plain, variables)):
            if gradient is None or (reduced_gradients.take_noted(gradient, variable) and not accumulates):
                continue
            would_change = self.scale_local_gradients if id(variable) in local else self.op == ReduceOp.Sum
            if would_change:
                again.append((gradient, variable))
        if not again:
            return
        for (_, variable), may_be in zip(again, reduced_gradients.may_be_reduced(*zip(*again))):
            if may_be:
                raise ConfigError(
                    "Gradients must be reduced only once. Received: a gradient of the variable "
                    f"{getattr(variable, 'name', '')!r} that a DistributedGradientTape has already reduced (in eager "
                    "mode: may have reduced), and that was then clipped, scaled or accumulated. "
                    f"{self.name} would reduce it again, with op={self.op.name} (rank {communicator.rank()}). Apply "
                    "it with a plain optimizer, without DistributedOptimizer; or use tf.GradientTape, and "
                    "let the optimizer clip the gradients."
                )

    @as_tensorflow_errors
    def all_agree(self, value: tf.Tensor) -> tf.Tensor:
        """Returns whether a bool is True on all ranks that take part. COLLECTIVE."""
        if not self.takes_part:
            return value
        agreed = ops.all_reduce(tf.cast(value, tf.int32), op="min", name=f"{self.name}/finite", comm=self.comm)
        return tf.cast(agreed, tf.bool)

    def _local_ids(self) -> set[int]:
        layer_variables = (variable for layer in self.local_layers for variable in layer.trainable_variables)
        return {id(plain(variable)) for variable in (*self.local_variables, *layer_variables)}

    def _before(self, tensor: tf.Tensor, size: int) -> tuple[tf.Tensor, Any]:
        if size > 1 and self.predivide != 1.0:
            tensor = tensor / self.predivide
        return (tensor, None) if self.compression is None else self.compression.compress(tensor)

    def _after(self, tensor: tf.Tensor, context: Any, size: int) -> tf.Tensor:
        if self.compression is not None:
            tensor = self.compression.decompress(tensor, context)
        if size > 1 and self.predivide != 1.0:
            tensor = tensor * (self.predivide / size)
        return tensor

    def _plan(self, tensors: Sequence[tf.Tensor], variables: Sequence[Any], comm: Communicator) -> list[list[int]]:
        """Returns the positions of the gradients in each bucket, in the order of the backward pass."""
        positions = list(range(len(tensors)))
        if isinstance(self.groups, int):
            count = min(self.groups, len(positions)) or 1
            ends = [len(positions) * (number + 1) // count for number in range(count)]
            return [positions[begin:end] for begin, end in zip([0, *ends], ends)][::-1]
        buckets = []
        if self.groups:
            where = {id(plain(variables[i])): i for i in positions}
            for group in self.groups:
                members = [where.pop(id(plain(each))) for each in group if id(plain(each)) in where]
                buckets += [members] if members else []
            positions = [i for i in positions if i in where.values()]
        plan = plan_for([tensors[i] for i in positions], bucket_size.of(comm))
        return [*buckets, *([positions[i] for i in bucket] for bucket in plan)]


def check_no_strategy(what: str, inside: bool, remedy: str = "") -> None:
    """Raises ConfigError inside of a keras_ddl.Strategy, which reduces gradients itself."""
    strategy = tf.distribute.get_strategy() if inside else None
    if strategy is not None and keras_compat.is_ddl_strategy(strategy):
        raise ConfigError(
            "Gradients must be reduced once: by keras_ddl.Strategy, or by Horovod's DistributedOptimizer or "
            f"DistributedGradientTape. Received: {what} gradients under a keras_ddl.Strategy (rank {strategy.rank}). "
            + (remedy or "Remove the Strategy, or use the plain optimizer and tf.GradientTape.")
        )


def check_may_reduce(optimizer: Any, op: Any) -> None:
    """Raises ConfigError for an optimizer whose gradients are already reduced, or an op that optimizers do not take."""
    name = getattr(optimizer, "name", None) or type(optimizer).__name__
    if own_reductions.reduction_of(optimizer) is not None:
        raise ConfigError(
            f"Gradients must be reduced only once. Received: optimizer {name!r}, which is already a "
            "DistributedOptimizer. Create another optimizer for another reduction."
        )
    check_no_strategy("DistributedOptimizer for", keras_compat.scope_strategy() is not None)
    if op not in (ReduceOp.Average, ReduceOp.Sum):
        raise ConfigError(
            f"op of DistributedOptimizer must be Average or Sum. Received: op={op!r}. For another op, use "
            "DistributedGradientTape."
        )


def plain(variable: Any) -> Any:
    """Returns the tf.Variable of a keras.Variable; anything else unchanged."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def _scaled(gradient: Any, factor: float) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values * factor, gradient.indices, gradient.dense_shape)
    return gradient * factor
