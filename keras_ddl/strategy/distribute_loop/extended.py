"""The interface that tf.distribute requires of a strategy, with one device per process and keras_ddl's collectives.

Weights are plain tf.Variables (variables.py describes the exceptions), and per-replica values are plain
tensors, because this process has one replica.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from keras_ddl import communicator, ops
from keras_ddl.communicator.native.dtypes import DTYPES
from keras_ddl.communicator.newcomers import history
from keras_ddl.communicator.reporting import stack_position
from keras_ddl.compat import keras as keras_compat
from keras_ddl.compat import strategies
from keras_ddl.compat import tensorflow as tf_compat
from keras_ddl.compat.names import plain_name
from keras_ddl.compat.tensorflow import tf
from keras_ddl.data import gather_rows, is_shared, per_rank_dataset, share_dataset
from keras_ddl.data.from_rank_0 import dataset_from_rank_0
from keras_ddl.data.share import agree_number
from keras_ddl.errors import ConfigError
from keras_ddl.gradients import buckets
from keras_ddl.state import replicate
from keras_ddl.strategy import agreement, one_per_job
from keras_ddl.strategy.agreement.equal_values import are_equal
from keras_ddl.strategy.agreement.random_state import seed_offset
from keras_ddl.strategy.calls import fits, tracing
from keras_ddl.strategy.distribute_loop import variables
from keras_ddl.strategy.distribute_loop.row_share import RowShare
from keras_ddl.strategy.job import Job
from keras_ddl.strategy.variables.origin import of_one_rank


def _label(value: tf.Tensor, name: str | None) -> str:
    """Returns the name of the collective in which a variable's initial value is agreed on.

    Ranks that build different models then call collectives of different names, and get an error that shows both names.
    """
    path = "/".join(part for part in (keras_compat.current_path(), name) if part) or "unnamed"
    return f"variable {plain_name(path)} {value.dtype.name}[{'x'.join(map(str, value.shape))}]"


class DdlExtended(strategies.StrategyExtendedV1):
    """Implements the hooks that tf.distribute.StrategyExtended documents."""

    experimental_between_graph = experimental_should_init = _global_batch_size = True
    _support_per_replica_values = False

    def __init__(self, container: tf.distribute.Strategy, job: Job) -> None:
        super().__init__(container)
        self._job, self.device = job, job.device
        self.bucket_size = job.bucket_size
        self.share = RowShare(job.rank, job.size)
        self._warned_of_updates = False
        self._functions: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    # ---- ranks and devices
    @property
    def rank(self) -> int:
        return self._job.rank

    @property
    def size(self) -> int:
        return self._job.size

    @property
    def _num_replicas_in_sync(self) -> int:
        # A step that sees the global batch behaves like one in a single process.
        return 1 if tracing.sees_global_batch() else self.size

    @property
    def worker_devices(self) -> tuple[str, ...]:
        return (self.device,)

    parameter_devices = worker_devices

    def non_slot_devices(self, var_list: Any) -> tuple[str, ...]:
        return (self.device,)

    def _in_multi_worker_mode(self) -> bool:
        return False  # True would make TensorFlow and Keras look for a TF_CONFIG cluster

    def _use_merge_call(self) -> bool:
        return False

    @property
    def should_checkpoint(self) -> bool:
        return self.rank == 0

    should_save_summary = should_checkpoint

    def _get_local_replica_id(self, replica_id_in_sync_group: int) -> int:
        return 0

    def _get_replica_id_in_sync_group(self, replica_id: int) -> int:
        return self.rank

    # ---- variables
    def _create_variable(self, next_creator: Callable[..., tf.Variable], **kwargs: Any) -> tf.Variable:
        kwargs.pop("colocate_with", None)  # this process uses one device
        if self.size == 1 and not history.takes_newcomers():
            with tf.device(self.device):
                return next_creator(**kwargs)
        variables.check(self.rank, **kwargs)
        if not of_one_rank.get() and kwargs.get("initial_value") is not None:  # None while a SavedModel is loaded
            agreed = self._agreed_initial_value if tf.executing_eagerly() else self._agreed_in_graph
            kwargs["initial_value"] = agreed(**kwargs)
        with tf.device(self.device):
            return variables.adopt(next_creator(**kwargs))

    def _agreed_initial_value(self, initial_value: Any, name: str | None = None, dtype: Any = None, **_: Any) -> Any:
        value = initial_value() if callable(initial_value) else initial_value
        value = tf.convert_to_tensor(value, dtype=dtype)
        label = _label(value, name)
        if value.dtype == tf.string:
            return tf.constant(communicator.broadcast_object(value.numpy(), root=0, name=label))
        # A joining rank replays the record, which must contain the values themselves.
        if not history.takes_newcomers() and are_equal([value], f"{label} digest"):
            return value
        array = replicate.broadcast_value(value.numpy(), label)
        if name == "learning_rate" and array != value.numpy():
            received = f"{array:g} on rank 0, {value.numpy():g} on rank {self.rank}"
            stack_position.warn(agreement.ONE_LEARNING_RATE.format(received))
        return tf.constant(array, dtype=value.dtype)

    def _agreed_in_graph(self, initial_value: Any, name: str | None = None, dtype: Any = None, **_: Any) -> Any:
        """Returns an initializer with rank 0's value, for a variable that is created while a function is traced."""

        def agreed() -> Any:
            value = initial_value() if callable(initial_value) else initial_value
            value = tf.convert_to_tensor(value, dtype=dtype)
            if value.dtype == tf.bool:
                return tf.cast(ops.broadcast(tf.cast(value, tf.uint8), root=0, name=_label(value, name)), tf.bool)
            if value.dtype.name not in DTYPES:
                raise ConfigError(
                    "A variable that is created inside a traced function must have a dtype that collectives support. "
                    f"Received: variable {name or 'without a name'} of {value.dtype.name} (rank {self.rank}). Create "
                    "the variable before, outside of the function."
                )
            return ops.broadcast(value, root=0, name=_label(value, name))

        return agreed

    def colocate_vars_with(self, colocate_with_variable: Any) -> contextlib.AbstractContextManager[Any]:
        """Returns an empty context, because there is one device. Keras's optimizers call this outside scopes, too."""
        return contextlib.nullcontext()

    def _validate_colocate_with_variable(self, colocate_with_variable: Any) -> None:
        pass  # variables from outside the scope are fine, because those from inside are plain, too

    def value_container(self, value: Any) -> Any:
        return value

    def _local_results(self, value: Any) -> tuple[Any, ...]:
        return (value,)

    def read_var(self, v: tf.Variable) -> tf.Tensor:
        return tf.identity(v)

    # ---- running
    def _call_for_each_replica(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if isinstance(fn, tf.types.experimental.PolymorphicFunction):
            # The exchange that opens the step and the replica context belong inside the traced function.
            if fn not in self._functions:
                python_function = fn.python_function

                def in_replica(*args: Any, **kwargs: Any) -> Any:
                    return self._call_for_each_replica(python_function, args, kwargs)

                self._functions[fn] = tf_compat.clone_function(fn, in_replica)
            return self._functions[fn](*args, **kwargs)
        with tf.device(self.device), self._rank_seed(), ReplicaContext(strategies.container_strategy(self), self.rank):
            if self.size > 1:
                args, kwargs = self.share.begin_step((args, kwargs))
            return fn(*args, **kwargs)

    @contextlib.contextmanager
    def _rank_seed(self) -> Iterator[None]:
        """Gives TensorFlow's stateful random ops different seeds on each rank while a step is traced."""
        if tf.executing_eagerly() or tf.compat.v1.get_default_graph().seed is None:
            yield
            return
        graph = tf.compat.v1.get_default_graph()
        before = graph.seed
        graph.seed = (before + seed_offset(self.rank)) % 2**31
        try:
            yield
        finally:
            graph.seed = before

    def _replica_ctx_update(self, var: Any, fn: Any, args: Any = (), kwargs: Any = None, group: bool = True) -> Any:
        mine, running = strategies.container_strategy(self), tf.distribute.get_strategy()
        if running is not mine and keras_compat.is_ddl_strategy(running):
            raise ConfigError(one_per_job.outside_message("An optimizer", f"optimizer of {var.name}", running, mine))
        with tf.device(self.device), variables.updating(True):
            return fn(var, *args, **(kwargs or {}))

    def _update(self, var: Any, fn: Any, args: Any, kwargs: Any, group: bool) -> Any:
        # Keras's optimizers call this outside of replica context at the end of fit, with moving averages of weights.
        is_alone = self.size > 1 and not tracing.sees_global_batch() and not fits.any_is_running()
        if is_alone and not self._warned_of_updates:
            self._warned_of_updates = True
            stack_position.warn(
                "An optimizer that was made under a keras_ddl.Strategy should apply gradients in strategy.function "
                f"or strategy.run. Received: gradients of this rank only (rank {self.rank} of {self.size}), so the "
                "weights of the ranks will drift apart unless you have reduced the gradients yourself "
                "(keras_ddl.all_reduce_n). Make the step with strategy.function, or call it with strategy.run(step, "
                "args=(batch,))."
            )
        return self._update_non_slot(var, fn, (var, *args), kwargs, group)

    def _update_non_slot(self, colocate_with: Any, fn: Any, args: Any, kwargs: Any, group: bool) -> Any:
        with tf.device(self.device), strategies.UpdateContext(self.device), variables.updating(True):
            result = fn(*args, **(kwargs or {}))
            return result if group else tf.nest.map_structure(self._local_results, result)

    # ---- collectives
    def reduce_structure(self, reduce_op: Any, value: Any, axis: int | tuple[int, ...] | None) -> Any:
        """Implements `Strategy.reduce`."""
        if isinstance(reduce_op, str):
            reduce_op = tf.distribute.ReduceOp(reduce_op.upper())
        is_mean = reduce_op == tf.distribute.ReduceOp.MEAN
        with variables.updating(True):  # ON_READ variables then return this rank's value
            flat = [tf.convert_to_tensor(leaf) for leaf in tf.nest.flatten(value)]
        with ops.translate_errors():
            return tf.nest.pack_sequence_as(value, [_reduced(leaf, is_mean, axis) for leaf in flat])

    def _all_reduce(self, reduce_op: tf.distribute.ReduceOp, values: list[Any], name: str) -> list[Any]:
        op = "mean" if reduce_op == tf.distribute.ReduceOp.MEAN else "sum"
        return buckets.all_reduce_in_buckets(values, op=op, name=name, bucket_size=self.bucket_size)

    def _replica_ctx_all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        flat = [v if isinstance(v, tf.IndexedSlices) else tf.convert_to_tensor(v) for v in tf.nest.flatten(value)]
        return tf.nest.pack_sequence_as(value, self._all_reduce(reduce_op, flat, "replica_all_reduce"))

    def _reduce_to(self, reduce_op: Any, value: Any, destinations: Any, options: Any) -> Any:
        if not isinstance(value, tf.IndexedSlices):
            value = tf.convert_to_tensor(value)
        return self._all_reduce(reduce_op, [value], "reduce")[0]

    def _batch_reduce_to(self, reduce_op: Any, value_destination_pairs: Any, options: Any) -> list[Any]:
        return [self._reduce_to(reduce_op, value, to, options) for value, to in value_destination_pairs]

    def _gather_to_implementation(self, value: Any, destinations: Any, axis: int, options: Any) -> tf.Tensor:
        value = tf.convert_to_tensor(value)
        if value.shape.rank == 0:
            raise ConfigError(
                f"gather concatenates the ranks' tensors along a dimension. Received: a scalar (rank {self.rank}). Add "
                "a dimension, as in gather(value[tf.newaxis], axis=0)."
            )
        axis = axis % value.shape.rank
        order = [axis, *(i for i in range(value.shape.rank) if i != axis)]
        back = np.argsort(order).tolist()
        name = "gather"
        if axis == 0:
            return gather_rows(value, self.rank, name=name)
        return tf.transpose(gather_rows(tf.transpose(value, order), self.rank, name=name), back)

    def _broadcast_to(self, tensor: Any, destinations: Any) -> Any:
        return ops.broadcast(tensor, root=0, name="broadcast")

    # ---- data
    def _experimental_distribute_dataset(self, dataset: Any, options: Any) -> Any:
        if is_shared(dataset) or (self.size == 1 and not history.takes_newcomers()):
            return dataset
        if self._job.reads_on_rank_0:
            return dataset_from_rank_0(lambda: dataset)
        return share_dataset(dataset, self.rank, self.size, agree_number())

    def _distribute_datasets_from_function(self, dataset_fn: Any, options: Any) -> Any:
        return per_rank_dataset(dataset_fn, self.rank, self.size)

    def _experimental_distribute_values_from_function(self, value_fn: Any) -> Any:
        return value_fn(tf.distribute.experimental.ValueContext(self.rank, self.size))


class ReplicaContext(strategies.ReplicaContext):
    """The context inside `Strategy.run`. Its all_reduce and all_gather are inherited from tf.distribute."""

    @property
    def devices(self) -> tuple[str, ...]:
        return self.strategy.extended.worker_devices


def _reduced(value: tf.Tensor, is_mean: bool, axis: int | tuple[int, ...] | None) -> tf.Tensor:
    name = "reduce"
    if axis is None:
        return ops.all_reduce(value, op="mean" if is_mean else "sum", name=name)
    total = ops.all_reduce(tf.reduce_sum(value, axis=axis), op="sum", name=name)
    if not is_mean:
        return total
    count = tf.size(value, out_type=tf.int64) // tf.maximum(tf.size(tf.reduce_sum(value, axis=axis), tf.int64), 1)
    count = ops.all_reduce(count, op="sum", name="reduce_count")
    return total / tf.cast(count, total.dtype)
