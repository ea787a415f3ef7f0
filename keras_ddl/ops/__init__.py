"""Collectives on TensorFlow tensors: eager, in tf.function, and differentiable.

All of these functions are COLLECTIVE: every rank calls them, with equal arguments apart from the values (and, in
all_gather, the rows). Ranks match calls by name. Eager calls without a name are matched in program order; calls from
several threads need names. In a tf.function every call has its own name by default, and the order in which TensorFlow
runs the calls does not matter.

`comm` is a communicator made by `keras_ddl.split`: "all ranks" below then means its ranks, and `root` is one of them.
None means all ranks. A function that was traced with a communicator fails once the communicator is closed.

Failures raise keras_ddl.errors on every rank, immediately in eager mode; a tf.function raises TensorFlow's errors,
which `translate_errors()` converts to keras_ddl's. Gradients are those of the sum of all ranks' losses. With one rank
all collectives return their input.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from keras_ddl.communicator import communicator_of
from keras_ddl.communicator.group import Communicator
from keras_ddl.communicator.native import binding
from keras_ddl.communicator.newcomers import history
from keras_ddl.compat.tensorflow import do_not_convert, tf
from keras_ddl.errors import ConfigError
from keras_ddl.ops import adaptive_sum, gradients, raw  # noqa: F401  (registers the gradients)
from keras_ddl.ops.arguments import (
    by_dtype,
    check_compression,
    check_root,
    dense_tensor,
    from_wire_dtype,
    movable,
    reduction_of,
    to_wire_dtype,
)
from keras_ddl.ops.errors import translate_errors
from keras_ddl.ops.exchange import all_to_all
from keras_ddl.ops.strings import all_gather_strings

__all__ = [
    "all_gather",
    "all_reduce",
    "all_reduce_n",
    "all_to_all",
    "broadcast",
    "broadcast_n",
    "broadcast_variables",
    "reduce_scatter",
    "translate_errors",
]


def __dir__() -> list[str]:
    return sorted(__all__)


# broadcast_variables copies the values of a request, so a limit per request limits the memory.
_REQUEST_BYTES = 256 << 20


def _is_eager_of_all(comm: Communicator | None) -> bool:
    is_of_all_ranks = comm is None or (isinstance(comm, Communicator) and comm.id == binding.WORLD)
    return bool(is_of_all_ranks and tf.executing_eagerly())


@do_not_convert
@history.collective(_is_eager_of_all)
def all_reduce(
    tensor: Any,
    *,
    op: str = "sum",
    name: str | None = None,
    comm: Communicator | None = None,
    compression: str | None = None,
) -> Any:
    """Reduces `tensor` over all ranks; every rank gets the result, bitwise equal.

    Args:
        tensor: shape [...], equal on all ranks, as is the dtype; or tf.IndexedSlices, whose rows may differ in number.
        op: "sum", "mean" (or "avg"), "min", "max", "product". The mean of integers is rounded toward zero. Or "adasum",
            the adaptive sum of floats (Maleki et al., arXiv 2006.02924): orthogonal tensors are added, equal ones
            averaged; ranks are combined in pairs, as a tree over any number of ranks.
        name: key by which ranks match calls, equal on all ranks; for the default see the module's docstring.
        comm: the ranks that take part; None for all.
        compression: None, "bfloat16" or "float16", the dtype of the data between hosts, equal on all ranks; see
            `all_reduce_n`. Dense float32, op "sum" or "mean" only.
    Returns: shape [...]; for IndexedSlices the rows of all ranks, divided by size for "mean". Their op must be "sum",
        or for floats "mean".
    Raises:
        ConfigError: an unknown op or dtype. NotInitializedError: before `keras_ddl.init()`.
        RankMismatchError: shapes, dtypes or ops differ. RankLostError, DeadlineError: a rank is missing.
    Cost: 2 * (size-1)/size * nbytes sent per rank (Patarasuk & Yuan, 2009); less inside shared memory. "adasum": the
        same bytes, nbytes of extra memory (three times that for 16-bit floats), and log2(size) small sums.
    """
    reduction = "adasum" if op == "adasum" else reduction_of(op)
    if compression is not None:
        dtypes = [] if isinstance(tensor, tf.IndexedSlices) else [dense_tensor(tensor, "all_reduce").dtype]
        check_compression(compression, None, reduction, dtypes, "all_reduce")
    comm = communicator_of(comm)
    if reduction == "adasum":
        tensor = adaptive_sum.floats(tensor, "all_reduce")
    if isinstance(tensor, tf.IndexedSlices):
        if compression is not None:
            raise ConfigError(
                "all_reduce: the rows of tf.IndexedSlices are gathered, not summed, so they cannot be compressed. "
                f"Received: compression={compression!r}. Leave it out, or use tf.convert_to_tensor first."
            )
        return _all_reduce_slices(tensor, reduction, name, comm)
    tensor = dense_tensor(tensor, "all_reduce")
    if comm.size == 1:
        return tf.identity(tensor)
    return raw.all_reduce(tensor, reduction, name, comm, compression=compression)


@do_not_convert
@history.collective(_is_eager_of_all)
def all_reduce_n(
    tensors: Sequence[Any],
    *,
    op: str = "sum",
    name: str | None = None,
    mpi: bool = False,
    check: float | None = None,
    comm: Communicator | None = None,
    compression: str | None = None,
    feedback: str | None = None,
) -> list[tf.Tensor]:
    """Reduces a list of tensors over all ranks in one collective, without concatenating them.

    Args:
        tensors: any number of tensors of any shapes; their number, shapes and dtypes are equal on all ranks. There is
            one collective for each dtype.
        op, name, comm: as in `all_reduce`; "adasum" combines each tensor separately.
        mpi: use plain MPI_Allreduce instead, as a baseline for results and times.
        check: reduce both ways and raise CheckFailedError where |a - b| > check * max(1, |b|), with b the baseline.
        compression: None, "bfloat16" or "float16": data between hosts is rounded to that dtype, half the bytes; data
            inside a host and the additions are float32. Equal on all ranks; float32, "sum" and "mean" only.
        feedback: with compression, the key under which each rank stores its rounding errors, which it adds to the next
            call of the same key (error feedback: Seide et al., 2014; Karimireddy et al., arXiv 1901.09847). Default:
            the name of the call. "" stores nothing, and neither does an eager call without a name.
    Returns: list of tensors, of the same shapes.
    Raises: as `all_reduce`, and CheckFailedError.
    Cost: that of one all_reduce of all bytes; `check` adds the baseline and its copy of the data. With compression half
        the bytes travel between hosts, and the ranks of a host together need as much memory for rounding errors as
        the tensors take.
    """
    reduction = "adasum" if op == "adasum" and not mpi and check is None else reduction_of(op)
    if check is not None and not (isinstance(check, (int, float)) and check >= 0):
        raise ConfigError(
            f"check must be a tolerance of 0 or more, or None for no comparison. Received: check={check!r}."
        )
    if mpi and check is not None:
        raise ConfigError(
            "check compares with the baseline that mpi=True selects, so the two exclude each other. Received: "
            f"mpi=True, check={check!r}. Leave out mpi."
        )
    checked = adaptive_sum.floats if reduction == "adasum" else dense_tensor
    tensors = [checked(tensor, "all_reduce_n") for tensor in tensors]
    check_compression(compression, feedback, reduction, [each.dtype for each in tensors], "all_reduce_n", mpi=mpi)
    comm = communicator_of(comm)
    if comm.size == 1:
        return [tf.identity(tensor) for tensor in tensors]
    tolerance = raw.NO_CHECK if check is None else float(check)

    def reduce(some: list[tf.Tensor], key: str | None) -> list[tf.Tensor]:
        return raw.all_reduce_n(
            some, reduction, key, comm, mpi=mpi, check=tolerance, compression=compression, feedback=feedback
        )

    return by_dtype(tensors, name, reduce)


@do_not_convert
@history.collective(_is_eager_of_all, history.not_recorded)
def reduce_scatter(
    tensor: Any, *, op: str = "sum", name: str | None = None, comm: Communicator | None = None
) -> tf.Tensor:
    """Reduces `tensor` over all ranks and leaves each rank one chunk of its rows.

    Args:
        tensor: shape [n, ...], equal on all ranks, as is the dtype; n may be less than size.
        op, name, comm: as in `all_reduce`.
    Returns: shape [n_r, ...], the rows of rank r, in the order of the ranks. Sizes differ by at most one row; the first
        n % size ranks have more.
    Raises: as `all_reduce`; ConfigError for a scalar.
    Cost: (size-1)/size * nbytes sent per rank (Patarasuk & Yuan, 2009).
    """
    reduction = reduction_of(op)
    tensor = dense_tensor(tensor, "reduce_scatter")
    if tensor.shape.rank == 0:
        raise ConfigError(
            "reduce_scatter splits a tensor by rows, so it must have at least one dimension. "
            "Received: a scalar. Use all_reduce."
        )
    comm = communicator_of(comm)
    if comm.size == 1:
        return tf.identity(tensor)
    return raw.reduce_scatter(tensor, reduction, name, comm)


@do_not_convert
@history.collective(_is_eager_of_all)
def all_gather(tensor: Any, *, name: str | None = None, comm: Communicator | None = None) -> tf.Tensor:
    """Concatenates the rows of all ranks, in the order of the ranks.

    Args:
        tensor: shape [n_r, ...]; n_r may differ between ranks and be 0, the other dimensions and the dtype are equal.
            A scalar counts as one row. Dtypes: those of `all_reduce`, bool, int16, uint16, uint32, uint64, complex64,
            complex128, and string.
        name, comm: as in `all_reduce`.
    Returns: shape [sum of n_r, ...]; [size] for scalars.
    Raises: as `all_reduce`.
    Cost: each rank receives the bytes of the other ranks' rows. Its gradient costs one all_reduce of the result.
    """
    tensor = movable(tensor, "all_gather", tf.string)
    comm = communicator_of(comm)
    if tensor.dtype == tf.string:
        return all_gather_strings(tensor, name, comm)
    tensor, dtype = to_wire_dtype(tensor, rows=True)
    if comm.size == 1:
        gathered = tf.reshape(tensor, [1]) if tensor.shape.rank == 0 else tf.identity(tensor)
    else:
        gathered, _ = raw.all_gather(tensor, name, comm)
    return from_wire_dtype(gathered, dtype)


@do_not_convert
@history.collective(_is_eager_of_all, history.left_to_join)
def broadcast(tensor: Any, root: int = 0, *, name: str | None = None, comm: Communicator | None = None) -> tf.Tensor:
    """Returns rank `root`'s `tensor` on every rank.

    Args:
        tensor: shape [...], equal on all ranks, as is the dtype (those of `all_gather`, except string); only the values
            of rank `root` matter.
        root: rank, 0 <= root < size.
        name, comm: as in `all_reduce`.
    Returns: shape [...].
    Raises: as `all_reduce`; ConfigError for a root that is not a rank.
    Cost: each rank receives nbytes. Its gradient costs one all_reduce.
    """
    return broadcast_n([tensor], root, name=name, comm=comm)[0]


@do_not_convert
@history.collective(_is_eager_of_all, history.left_to_join)
def broadcast_n(
    tensors: Sequence[Any], root: int = 0, *, name: str | None = None, comm: Communicator | None = None
) -> list[tf.Tensor]:
    """Like `broadcast` for a list of `tensors`, with one collective for each dtype."""
    return _broadcast(tensors, root, name, communicator_of(comm))


@do_not_convert
def broadcast_variables(variables: Sequence[Any], root: int = 0, *, comm: Communicator | None = None) -> Any:
    """Assigns rank `root`'s values to `variables` on every rank.

    Args:
        variables: tf.Variable or keras.Variable, the same in the same order on all ranks; dtypes as in `broadcast`.
        root, comm: as in `broadcast`.
    Returns: None; in a TensorFlow 1 graph the tf.Operation that assigns, which a session must run.
    Raises: as `broadcast`; RankMismatchError names the first variable that differs between ranks.
    Cost: each rank receives the bytes of all variables, in requests of at most 256 MiB or one variable.
    """
    from keras_ddl.ops import variables as variable_lists

    tf_variables = variable_lists.unwrap(variables)
    if not history.recovers() or not _is_eager_of_all(comm):
        return _broadcast_variables(tf_variables, root, communicator_of(comm))

    def make() -> Any:
        return history.repeated(
            lambda world: _broadcast_variables(tf_variables, root, world, at_once=True), comm, lambda: tf_variables
        )

    return history.left_to_join(lambda: None, make)


def _broadcast_variables(
    tf_variables: list[tf.Variable], root: int, comm: Communicator, *, at_once: bool = False
) -> Any:
    """at_once: assign only after all values have arrived, so that a lost root does not leave only some values."""
    from keras_ddl.ops import variables as variable_lists

    check_root(root, comm)
    # A session runs only requested ops, in no fixed order, so names must be unique and the caller must run the ops.
    is_in_session = not tf.executing_eagerly() and not tf.inside_function()
    name = (
        tf.compat.v1.get_default_graph().unique_name("broadcast_variables") if is_in_session else "broadcast_variables"
    )
    if comm.size == 1:
        return tf.group() if is_in_session else None
    if tf.executing_eagerly():
        variable_lists.check_equal_on_all_ranks(tf_variables, comm)
    detail, fingerprint = variable_lists.describe(tf_variables), variable_lists.fingerprint(tf_variables)

    def values(group: list[tf.Variable]) -> list[Any]:
        # read_value runs after the graph's current control dependencies, such as initializers.
        return [variable.read_value() for variable in group] if is_in_session else group

    received: Iterator[tuple[tf.Variable, tf.Tensor]] = itertools.chain.from_iterable(
        zip(group, _broadcast(values(group), root, f"{name}/{number}", comm, detail=detail, fingerprint=fingerprint))
        for number, group in enumerate(variable_lists.groups(tf_variables, _REQUEST_BYTES))
    )
    assigned = [variable.assign(value) for variable, value in (list(received) if at_once else received)]
    return tf.group(*assigned) if is_in_session else None


def _broadcast(
    tensors: Sequence[Any], root: int, name: str | None, comm: Communicator, **attrs: Any
) -> list[tf.Tensor]:
    check_root(root, comm)
    pairs = [to_wire_dtype(movable(tensor, "broadcast")) for tensor in tensors]
    sent = [tensor for tensor, _ in pairs]
    if comm.size == 1:
        received = [tf.identity(tensor) for tensor in sent]
    else:
        received = by_dtype(sent, name, lambda some, key: raw.broadcast_n(some, root, key, comm, **attrs))
    return [from_wire_dtype(tensor, dtype) for tensor, (_, dtype) in zip(received, pairs)]


def _all_reduce_slices(
    slices: tf.IndexedSlices, reduction: str, name: str | None, comm: Communicator
) -> tf.IndexedSlices:
    if reduction not in ("sum", "mean"):
        raise ConfigError(
            "IndexedSlices can be reduced by 'sum' and 'mean' only, because rows that a rank does not list are zero. "
            f"Received: op={reduction!r}. Use tf.convert_to_tensor first."
        )
    if reduction == "mean" and not slices.values.dtype.is_floating:
        raise ConfigError(
            "The mean of IndexedSlices needs floats: integers would be rounded before rows with the same index are "
            f"added. Received: {slices.values.dtype.name}. Use tf.convert_to_tensor first."
        )
    values = all_gather(dense_tensor(slices.values, "all_reduce"), name=name and f"{name}/values", comm=comm)
    indices = all_gather(slices.indices, name=name and f"{name}/indices", comm=comm)
    if reduction == "mean":
        values = values / tf.cast(comm.size, values.dtype)
    return tf.IndexedSlices(values, indices, slices.dense_shape)
