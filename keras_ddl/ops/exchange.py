"""all_to_all: every rank sends each rank some of its rows. Composed of all_gather."""

from __future__ import annotations

from typing import Any

from keras_ddl.communicator import communicator_of
from keras_ddl.communicator.group import Communicator
from keras_ddl.compat.tensorflow import tf
from keras_ddl.errors import ConfigError
from keras_ddl.ops import raw
from keras_ddl.ops.arguments import from_wire_dtype, movable, to_wire_dtype
from keras_ddl.ops.errors import translate_errors


@tf.autograph.experimental.do_not_convert
def all_to_all(tensor: Any, splits: Any = None, *, name: str | None = None, comm: Communicator | None = None) -> Any:
    """Sends each rank a run of this rank's rows, and returns the rows that all ranks sent to this one.

    Args:
        tensor: shape [n_r, ...]; n_r may differ between ranks and be 0, the other dimensions and the dtype (those of
            `all_gather`) are equal.
        splits: whole numbers, shape [size]: how many rows go to rank 0, to rank 1, and so on. Default: equally many.
        name, comm: as in `all_reduce`.
    Returns: shape [m_r, ...], ordered by the rank that sent them. With `splits` also int64 [size]: how many rows each
        rank has sent.
    Raises:
        ConfigError: a scalar; splits that are not [size] whole numbers.
        RankMismatchError: on every rank, as `all_reduce`; some rank's splits do not add up to its rows, or, without
            splits, its rows cannot be divided by the number of ranks.
    Cost: that of an all_gather: every rank receives the rows of all ranks, size times what it keeps. The gradient costs
        one all_reduce of all ranks' rows.
    """
    tensor = movable(tensor, "all_to_all")
    comm = communicator_of(comm)
    if tensor.shape.rank == 0:
        raise ConfigError(
            "all_to_all splits a tensor by rows, so it must have at least one dimension. "
            "Received: a scalar. Use all_gather."
        )
    tensor, dtype = to_wire_dtype(tensor)
    rows = tf.shape(tensor, tf.int64)[:1]
    to_each = tf.repeat(rows // comm.size, comm.size) if splits is None else _splits(splits, comm)
    plan = tf.concat([to_each, rows], 0)[tf.newaxis]
    if comm.size > 1:
        plan, _ = raw.all_gather(plan, name and f"{name}/splits", comm, all_ranks=True)
        gathered, _ = raw.all_gather(tensor, name, comm, all_ranks=True)
    sent, held = plan[:, :-1], plan[:, -1]
    check = _check(sent, held, comm)
    with tf.control_dependencies([check] if check is not None else []):  # None: in eager mode it has been made
        received = tf.ensure_shape(sent[:, comm.rank], [comm.size])
    if comm.size == 1:
        result = from_wire_dtype(tf.identity(tensor), dtype)
        return result if splits is None else (result, received)
    # Where the rows of each rank begin in what was gathered, and within these the ones for this rank.
    begin = tf.cumsum(held, exclusive=True) + tf.reduce_sum(sent[:, : comm.rank], 1)
    places = tf.concat([tf.range(begin[r], begin[r] + received[r]) for r in range(comm.size)], 0)
    result = from_wire_dtype(tf.gather(gathered, places), dtype)
    return result if splits is None else (result, received)


def _splits(splits: Any, comm: Communicator) -> tf.Tensor:
    splits = tf.convert_to_tensor(splits)
    if not splits.dtype.is_integer or not splits.shape.is_compatible_with([comm.size]):
        raise ConfigError(
            f"splits must be {comm.size} whole numbers, one for each rank. Received: {splits.dtype.name}, shape "
            f"{splits.shape} on rank {comm.rank}."
        )
    return tf.ensure_shape(tf.cast(splits, tf.int64), [comm.size])


def _check(sent: tf.Tensor, held: tf.Tensor, comm: Communicator) -> Any:
    """Every rank sees the splits of all, so that all of them raise."""
    right = tf.reduce_all(tf.reduce_sum(sent, 1) == held) & tf.reduce_all(sent >= 0)
    splits = tf.strings.reduce_join(tf.strings.as_string(sent), 1, separator=", ")
    received = tf.strings.join([tf.strings.as_string(held), " rows in splits of ", splits])
    rule = (
        "keras_ddl: all_to_all: the splits of every rank must be 0 or more and add up to its rows; without splits, the "
        f"rows must be a multiple of the number of ranks ({comm.size}). Received, rank by rank: "
    )
    text = tf.strings.join([rule, tf.strings.reduce_join(received, separator="; "), "."])
    with translate_errors():
        return tf.raw_ops.Assert(condition=right, data=[text])
