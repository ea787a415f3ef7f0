"""all_to_all: every rank sends each rank some of its rows."""

from __future__ import annotations

from typing import Any

from keras_ddl.communicator import communicator_of
from keras_ddl.communicator.group import Communicator
from keras_ddl.compat.tensorflow import do_not_convert, tf, traced_for_xla
from keras_ddl.errors import ConfigError
from keras_ddl.ops import raw
from keras_ddl.ops.arguments import from_wire_dtype, movable, to_wire_dtype


@do_not_convert
def all_to_all(tensor: Any, splits: Any = None, *, name: str | None = None, comm: Communicator | None = None) -> Any:
    """Sends each rank some of this rank's rows, in order, and returns the rows that all ranks sent to this one.

    Args:
        tensor: shape [n_r, ...]; n_r may differ between ranks and be 0, the other dimensions and the dtype (those of
            `all_gather`) are equal.
        splits: integers, shape [size]: how many rows go to rank 0, to rank 1, and so on. Default: equal numbers.
        name, comm: as in `all_reduce`.
    Returns: shape [m_r, ...], in the order of the sending ranks. With `splits` also int64 [size]: the number of rows
        from each rank.
    Raises:
        ConfigError: a scalar; splits that are not [size] integers; on every rank: the splits of a rank do not add up to
            its rows or, without splits, its rows are not a multiple of the number of ranks.
        RankMismatchError: as for `all_reduce`.
    Cost: every row is sent once, directly to its receiver: nbytes sent and as many received per rank. The gradient is
        an all_to_all in the other direction.
    """
    tensor = movable(tensor, "all_to_all")
    comm = communicator_of(comm)
    if tensor.shape.rank == 0:
        raise ConfigError(
            "all_to_all splits a tensor by rows, so it must have at least one dimension. "
            "Received: a scalar. Use all_gather."
        )
    tensor, dtype = to_wire_dtype(tensor)
    if splits is None:
        # If they do not add up to the rows, the core fails the collective on every rank.
        to_each = tf.fill([comm.size], tf.shape(tensor, tf.int64)[0] // comm.size)
    else:
        to_each = _splits(splits, comm)
    if comm.size == 1 and (splits is None or traced_for_xla()):
        # Without a collective, so that XLA can compile it. Otherwise the core checks the splits of one rank, too.
        result, received = tf.identity(tensor), to_each
    else:
        result, received = raw.all_to_all(tensor, to_each, name, comm)
    result = from_wire_dtype(result, dtype)
    return result if splits is None else (result, received)


def _splits(splits: Any, comm: Communicator) -> tf.Tensor:
    splits = tf.convert_to_tensor(splits)
    if not splits.dtype.is_integer or not splits.shape.is_compatible_with([comm.size]):
        raise ConfigError(
            f"splits must be {comm.size} integers, one for each rank. Received: {splits.dtype.name}, shape "
            f"{splits.shape} on rank {comm.rank}."
        )
    return tf.ensure_shape(tf.cast(splits, tf.int64), [comm.size])
