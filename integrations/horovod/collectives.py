"""Horovod's collectives on tensors, on top of keras_ddl.ops.

All are COLLECTIVE over the ranks of `process_set`, work eagerly and in tf.function, and are differentiable: a gradient
belongs to the sum of all ranks' losses, or to their mean in a broadcast. Ranks match calls by `name`. Without names
they match calls by order, or in a tf.function by position in the graph. If ranks disagree about shape, dtype, op or
root, all of them get tf.errors.FailedPreconditionError, and the next collective works.

`device_dense`, `device_sparse` and `ignore_name_scope` are ignored: TensorFlow places the ops, and names are used
unchanged. `root_rank` is a rank of the job, also in a process set.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from keras_ddl import ops
from keras_ddl.communicator.reporting import stack_position
from keras_ddl.compat.tensorflow import do_not_convert, tf
from keras_ddl.errors import ConfigError
from keras_ddl.horovod.basics import Average, ReduceOp, Sum, check_sparse, reduce_op
from keras_ddl.horovod.compression import Compression
from keras_ddl.horovod.failures import InvalidArgumentError, UnsupportedError, as_tensorflow_errors
from keras_ddl.horovod.process_sets import ProcessSet, communicator_of, global_process_set, root_in


@as_tensorflow_errors
def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    *,
    sparse_as_dense: bool = False,
) -> Any:
    """Reduces `tensor` over the ranks; see `keras_ddl.all_reduce`.

    Args:
        tensor: shape [...] and dtype equal on all ranks; or tf.IndexedSlices, only for Average and Sum.
        average: the old form of op: True for Average, False for Sum.
        compression: for float32 and float64 tensors; IndexedSlices are gathered without compression.
        op: Average (default), Sum, Min, Max, Product, Adasum. Averages of integers are rounded toward zero.
        prescale_factor, postscale_factor: factors before and after the reduction. Integers are scaled in float64 and
            rounded toward zero.
        sparse_as_dense: convert IndexedSlices to dense tensors first.
    Returns: shape [...]; for IndexedSlices the rows of all ranks.
    Raises: ConfigError: the op is unknown. UnsupportedError: the op does not support IndexedSlices.
    """
    args = (compression, _op(op, average), prescale_factor, postscale_factor, process_set)
    if sparse_as_dense and isinstance(tensor, tf.IndexedSlices):
        tensor = tf.convert_to_tensor(tensor)
    if isinstance(tensor, tf.IndexedSlices):
        return _all_reduce_slices(tensor, *args[1:], name)
    return _all_reduce([tensor], *args, name)[0]


@as_tensorflow_errors
def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
    *,
    sparse_as_dense: bool = False,
) -> list[Any]:
    """Works like `allreduce`, for several tensors in one operation. See `keras_ddl.all_reduce_n`."""
    args = (compression, _op(op, average), prescale_factor, postscale_factor, process_set)
    slices = [isinstance(each, tf.IndexedSlices) and not sparse_as_dense for each in tensors]
    dense = iter(_all_reduce([each for each, sparse in zip(tensors, slices) if not sparse], *args, name))
    return [
        _all_reduce_slices(each, *args[1:], name and f"{name}/{place}") if sparse else next(dense)
        for place, (each, sparse) in enumerate(zip(tensors, slices))
    ]


@as_tensorflow_errors
def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Concatenates the rows of all ranks, which may differ in number; see `keras_ddl.all_gather`."""
    return ops.all_gather(tensor, name=name, comm=communicator_of(process_set))


@as_tensorflow_errors
def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """Works like `allgather`, for several tensors."""
    comm = communicator_of(process_set)
    return [ops.all_gather(each, name=key, comm=comm) for each, key in zip(tensors, _names(name, tensors))]


@as_tensorflow_errors
def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Returns rank `root_rank`'s `tensor`; shape and dtype must be equal on all ranks. See `keras_ddl.broadcast`.

    The gradient at the root is the mean of all ranks' gradients, and zero elsewhere, as in Horovod.
    """
    comm = communicator_of(process_set)
    return _mean_gradient(ops.broadcast(tensor, root_in(process_set, root_rank), name=name, comm=comm), comm.size)


@as_tensorflow_errors
def broadcast_(
    variables: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[tf.Tensor]:
    """Assigns rank `root_rank`'s values to `variables` (one, or a list), and returns the new values.

    In a TensorFlow 1 graph, running the returned tensors in a session assigns the values. `name` is ignored: ranks
    match calls by order, and lists that differ are an error on every rank.
    """
    variables = list(variables) if isinstance(variables, (list, tuple)) else [variables]
    comm = communicator_of(process_set)
    assign = ops.broadcast_variables(variables, root_in(process_set, root_rank), comm=comm)
    with tf.control_dependencies([] if assign is None else [assign]):
        # Not tf.identity, which may return an old value of a variable without a resource.
        return [each.read_value() if hasattr(each, "read_value") else tf.identity(each) for each in variables]


@as_tensorflow_errors
def broadcast_variables(
    variables: Sequence[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> Any:
    """Assigns rank `root_rank`'s values to `variables`; see `keras_ddl.broadcast_variables`. Always in place.

    Returns: None; in a TensorFlow 1 graph, the assign operation for a session to run.
    """
    comm = communicator_of(process_set)
    return ops.broadcast_variables(list(variables), root_in(process_set, root_rank), comm=comm)


def broadcast_global_variables(root_rank: int) -> Any:
    """Returns the operation that assigns rank `root_rank`'s values to all variables of a TensorFlow 1 graph.

    Raises: UnsupportedError: outside of such a graph, where TensorFlow has no list of all variables.
    """
    if tf.executing_eagerly() or tf.inside_function():
        raise UnsupportedError(
            "broadcast_global_variables is for graphs of TensorFlow 1; TensorFlow 2 keeps no list of all variables. "
            "Received: a call in eager execution. Use broadcast_variables(variables, root_rank=0) with the variables "
            "of the model and of the optimizer, or callbacks.BroadcastGlobalVariablesCallback(0)."
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


@as_tensorflow_errors
def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: Any = Compression.none,
    op: str = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> tf.Tensor:
    """Reduces `tensor` and leaves each rank its rows; see `keras_ddl.reduce_scatter`.

    If the number of rows is not a multiple of the number of ranks, the first ranks get one more.

    Raises: ConfigError: a scalar, or Adasum.
    """
    reduction, comm = _op(op, None), communicator_of(process_set)
    wire, context = compression.compress(_scaled(tensor, prescale_factor))
    result = ops.reduce_scatter(wire, op=reduction.value, name=name, comm=comm)
    return _scaled(compression.decompress(result, context), postscale_factor)


def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: Any = Compression.none,
    op: str = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
) -> list[tf.Tensor]:
    """Works like `reducescatter`, for several tensors."""
    rest = (process_set, False, prescale_factor, postscale_factor)
    return [
        reducescatter(each, device_dense, compression, op, key, *rest)
        for each, key in zip(tensors, _names(name, tensors))
    ]


@as_tensorflow_errors
def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Sends each rank some of the rows; see `keras_ddl.all_to_all`.

    Returns: the rows received; with `splits` also the number of rows from each rank, int32 [size].
    Raises: InvalidArgumentError: the splits do not fit the number of ranks; or, on every rank, one rank's splits do not
        fit its rows.
    """
    comm = communicator_of(process_set)
    try:
        result = ops.all_to_all(tensor, splits, name=name, comm=comm)
    except ConfigError as error:
        raise InvalidArgumentError(str(error)) from error
    return result if splits is None else (result[0], tf.cast(result[1], tf.int32))


@as_tensorflow_errors
def join() -> int:
    """Announces that this rank has no more data; returns the last rank to join. See `keras_ddl.join`."""
    return communicator_of(global_process_set).join()


def _op(op: Any, average: bool | None) -> ReduceOp:
    if average is not None:
        if op is not None:
            raise ConfigError("average is the old form of op, so only one may be given. Received: both. Use op.")
        stack_position.warn("average= is deprecated: use op=hvd.Average or op=hvd.Sum.", DeprecationWarning)
        return Average if average else Sum
    return reduce_op(op)


def _all_reduce(
    tensors: Sequence[Any],
    compression: Any,
    op: ReduceOp,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    name: str | None,
) -> list[tf.Tensor]:
    comm = communicator_of(process_set)
    pairs = [compression.compress(_scaled(tensor, prescale)) for tensor in tensors]
    wires = [wire for wire, _ in pairs]
    if len(wires) == 1:
        reduced = [ops.all_reduce(wires[0], op=op.value, name=name, comm=comm)]
    else:
        reduced = ops.all_reduce_n(wires, op=op.value, name=name, comm=comm)
    results = [compression.decompress(wire, context) for wire, (_, context) in zip(reduced, pairs)]
    return [_scaled(result, postscale) for result in results]


def _all_reduce_slices(
    slices: tf.IndexedSlices,
    op: ReduceOp,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    name: str | None,
) -> tf.IndexedSlices:
    check_sparse(op)
    slices = tf.IndexedSlices(_scaled(slices.values, prescale), slices.indices, slices.dense_shape)
    total = ops.all_reduce(slices, op=op.value, name=name, comm=communicator_of(process_set))
    return tf.IndexedSlices(_scaled(total.values, postscale), total.indices, total.dense_shape)


@do_not_convert
def _mean_gradient(tensor: tf.Tensor, size: int) -> tf.Tensor:
    """Returns the tensor unchanged; its gradient is divided by the number of ranks."""
    if size == 1 or not tensor.dtype.is_floating:
        return tensor
    return tf.custom_gradient(lambda x: (tf.identity(x), lambda dy: dy / tf.cast(size, dy.dtype)))(tensor)


def _scaled(tensor: Any, factor: Any) -> tf.Tensor:
    tensor = tf.convert_to_tensor(tensor)
    if isinstance(factor, (int, float)) and factor == 1:
        return tensor
    # 16-bit floats cannot represent most factors precisely, and integers cannot represent fractions.
    inside = tf.float64 if tensor.dtype.is_integer else tf.float32 if tensor.dtype.size == 2 else tensor.dtype
    return tf.cast(tf.cast(tensor, inside) * tf.cast(factor, inside), tensor.dtype)


def _names(name: str | None, tensors: Sequence[Any]) -> list[str | None]:
    return [name and f"{name}/{place}" for place in range(len(tensors))]
